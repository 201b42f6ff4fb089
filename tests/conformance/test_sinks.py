"""Every sink there is, held by one suite; and the suite finds sinks that are wrong."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from unisono.observe.metrics import JsonLines, read_lines
from unisono.spec.errors import UsageError
from unisono.spec.sink import SINKS, Observer, RunFacts, Sink, StepRecord
from unisono.train.state.writing import writing
from unisono_contrib.verify.conformance.sink import facts, faults, play, records

FILES = [name for name in SINKS.names() if not SINKS.find(name).follows]
TRACKERS = [pytest.param(name, marks=pytest.mark.slow) if name != "tensorboard" else name
            for name in SINKS.names() if SINKS.find(name).follows]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_sink_looks_and_changes_nothing_and_tells_each_step_once(name: str, tmp_path: Path) -> None:
    assert list(faults(SINKS.read(name), tmp_path)) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_has_each_step_once_through_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = SINKS.read(name)
    for module in tracker.needs:  # type: ignore[attr-defined]
        pytest.importorskip(module)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path) if name == "trackio" else None
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path) if name == "trackio" else None
    assert list(faults(tracker, tmp_path)) == []


@pytest.mark.parametrize(
    "name", [name for name in FILES if name != "profile"]
)  # which has a live run to write of
def test_a_full_disk_is_the_houses_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught, writing(tmp_path), _full():
        play(SINKS.read(name), facts(tmp_path), records(0, 11))
    assert caught.value.code == "O01" and str(tmp_path) in caught.value.where


@contextmanager
def _full() -> Iterator[None]:
    """No file of this process grows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_of_the_table_is_a_step_with_its_parts(tmp_path: Path) -> None:
    play(SINKS.read("csv"), facts(tmp_path), records(0, 2))
    head, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3 and head.startswith(
        "step,loss,lr,grad_norm,tokens,seconds,bytes_sent,mem_mib,data_s"
    )
    named = dict(zip(head.split(","), rows[1].split(","), strict=True))
    assert (named["step"], float(named["loss"]), named["bytes_sent"]) == ("1", 3.0 + 1 / 1024, "7001")
    (tmp_path / "metrics.csv").write_text("\n".join([head, *rows]) + "\n3,2.9")  # killed while it wrote
    play(SINKS.read("csv"), facts(tmp_path, step=3), records(3, 3))
    assert [row.split(",")[0] for row in (tmp_path / "metrics.csv").read_text().splitlines()[1:]] == list(
        "0123"
    )


def test_a_resumed_run_with_fewer_ranks_forgets_the_others(tmp_path: Path) -> None:
    for rank in (1, 2):
        with JsonLines(tmp_path / "events" / f"rank{rank}.jsonl") as lines:
            lines.write({"kind": "info"}, *({"step": step} for step in range(6)))
    SINKS.read("events").open(facts(tmp_path, step=4)).close()
    told = {rank: len(read_lines(tmp_path / "events" / f"rank{rank}.jsonl")[0]) for rank in (1, 2)}
    assert told == {1: 7, 2: 5}


class _Lines(Observer):
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def observe(self, steps: Sequence[StepRecord]) -> None:
        with self.path.open("a") as out:
            out.writelines(f"{one.loss!r}\n" for one in steps)


class Doubling(Sink):
    """Writes lines again after a resume."""

    name = "doubling"

    def open(self, run: RunFacts) -> Observer:
        return _Lines(run.run_dir / "lines")


class Silent(Sink):
    """Writes nothing."""

    name = "silent"

    def open(self, run: RunFacts) -> Observer:
        class _Nothing(Observer):
            def observe(self, steps: Sequence[StepRecord]) -> None: ...

        return _Nothing()


class Meddling(Sink):
    """Changes what the next observer gets."""

    name = "meddling"

    def open(self, run: RunFacts) -> Observer:
        class _Meddler(_Lines):
            def observe(self, steps: Sequence[StepRecord]) -> None:
                super().observe(steps)
                steps[0].times["data"] = 0.0  # type: ignore[index]

        (run.run_dir / "lines").unlink(missing_ok=True)
        return _Meddler(run.run_dir / "lines")


class Forgetting(Sink):
    """Begins its file anew when a run is resumed."""

    name = "forgetting"

    def open(self, run: RunFacts) -> Observer:
        (run.run_dir / "lines").unlink(missing_ok=True)
        return _Lines(run.run_dir / "lines")


@pytest.mark.parametrize(
    ("sink", "words"),
    [(Doubling(), "holds steps"), (Silent(), "leaves nothing"), (Meddling(), "changes the records"),
     (Forgetting(), "holds steps")],
)  # fmt: skip
def test_the_suite_finds_what_is_wrong(sink: Sink, words: str, tmp_path: Path) -> None:
    assert any(words in fault for fault in faults(sink, tmp_path))

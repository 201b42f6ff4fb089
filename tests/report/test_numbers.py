"""What the report says: read back from made-up runs whose causes are known."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.runs import write_run
from unisono.report import analyse, picture
from unisono.report.collect import collect
from unisono.report.pipelines import pipeline_of
from unisono.report.verdict.evidence import STACKED
from unisono.report.verdict.gather import gather
from unisono.report.verdict.judge import judge
from unisono.spec import words
from unisono.spec.errors import UsageError
from unisono.spec.runs import run_folder


@pytest.fixture(scope="module")
def straggler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a1", dp=2, pp=2, straggler=3, steps=24)


def test_a_whole_run_misses_nothing(straggler: Path) -> None:
    run = collect(straggler)
    assert run.missing == ()
    assert (run.name, len(run.steps), len(run.ranks), len(run.traces)) == ("stdlib-gpt", 24, 4, 4)
    assert run.ranks[3].place == "pp=1 dp=1"


def test_the_straggler_is_blamed(straggler: Path) -> None:
    verdict = judge(gather(collect(straggler)))
    assert (verdict.cause, verdict.rank) == ("straggler", 3)
    assert verdict.sentence.startswith("Limited by rank 3 (pp=1 dp=1), ")
    assert "rank 3" in verdict.advice


def test_parts_of_a_step_add_up(straggler: Path) -> None:
    shares = analyse.shares(collect(straggler))
    assert len({round(share.wall, 9) for share in shares}) == 1
    evidence = gather(collect(straggler))
    assert evidence.wall == pytest.approx(shares[0].wall)
    assert sum(evidence.part(part) for part in STACKED) == pytest.approx(evidence.wall)


def test_planned_and_measured_timetable_agree_but_for_messages(straggler: Path) -> None:
    pipeline = pipeline_of(collect(straggler))
    assert pipeline is not None
    assert pipeline.replica == "dp=1"  # the straggler's
    assert len(pipeline.planned) == len(pipeline.measured) == 2 * 2 * 4
    assert pipeline.ideal_bubble == pytest.approx(1 / 5)
    assert pipeline.planned_bubble > pipeline.ideal_bubble  # its stages are not equal
    assert abs(pipeline.measured_bubble - pipeline.planned_bubble) < 0.05


def test_an_even_run_is_limited_by_compute(tmp_path: Path) -> None:
    verdict = judge(gather(collect(write_run(tmp_path / "r", dp=2, steps=24))))
    assert verdict.sentence.startswith("Limited by compute: ")
    assert verdict.rank is None and not verdict.trouble


def test_more_ranks_than_cores_are_limited_by_the_cores(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", dp=4, steps=24)
    environment = json.loads((folder / "env.json").read_text()) | {"cores_usable": 2}
    (folder / "env.json").write_text(json.dumps(environment))
    assert "this machine's cores, 2 for 4 ranks" in judge(gather(collect(folder))).sentence


def _events(folder: Path, rank: int, **time: float) -> None:
    path = folder / "events" / f"rank{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "step", "step": s, "rank": rank, "time": time} for s in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("time", "cause"),
    [
        ({"forward": 1.0, "backward": 2.0, "comm_exposed": 2.0}, "communication"),
        ({"forward": 1.0, "backward": 1.0, "data": 1.0}, "input"),
        ({"forward": 1.0, "backward": 2.0, "optim": 1.0}, "memory bandwidth"),
        ({"forward": 1.0, "backward": 2.0, "data": 0.1}, "compute"),
    ],
)
def test_the_largest_overhead_is_named(tmp_path: Path, time: dict[str, float], cause: str) -> None:
    (tmp_path / "summary.json").write_text('{"plan": "dp=2", "ranks": 2}')
    for rank in (0, 1):
        _events(tmp_path, rank, **time)
    assert judge(gather(collect(tmp_path))).cause == cause


def test_a_stretch_of_steps_is_judged_alone(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    lines = [
        {"kind": "step", "step": s, "rank": 0, "time": {"forward": 1.0, "data": 3.0 if s > 50 else 0.0}}
        for s in range(1, 101)
    ]
    (tmp_path / "events/rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = collect(tmp_path)
    assert [judge(gather(run, window)).cause for window in ((1, 50), (60, 90))] == ["compute", "input"]


def test_bytes_are_per_step_and_over_all_ranks(straggler: Path) -> None:
    table = analyse.bytes_table(collect(straggler))
    assert table == [("dp", "all_reduce", 4 * 1_150_000), ("pp", "send", 4 * 4 * 262_144)]


def test_the_ledger_has_algorithm_and_codec_and_runs_of_before_have_neither(tmp_path: Path) -> None:
    (old,) = analyse.ledger(collect(write_run(tmp_path / "old", dp=2, steps=4)))
    assert (old.axis, old.op, old.algorithm, old.codec, old.nbytes) == (
        "dp",
        "all_reduce",
        "",
        "",
        2 * 1_150_000,
    )
    folder = write_run(tmp_path / "run", dp=2, steps=4)
    for path in (folder / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told = {"dp/all_to_all/engine/mine.py:Own:x=1/2": 5, "dp/all_gather/ring/": 7}
        path.write_text("".join(json.dumps(line | {"ledger": told}) + "\n" for line in lines))
    rows = [(one.op, one.algorithm, one.codec, one.nbytes) for one in analyse.ledger(collect(folder))]
    assert rows == [("all_gather", "ring", "", 14), ("all_to_all", "engine", "mine.py:Own:x=1/2", 10)]


def test_what_is_damaged_is_named_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", dp=2, pp=2, steps=6)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    (folder / "events" / "rank1.jsonl").write_bytes(
        b"\x00\xff\n" + (folder / "events" / "rank1.jsonl").read_bytes()
    )
    whole = (folder / "trace" / "rank2.json.gz").read_bytes()
    (folder / "trace" / "rank2.json.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "trace" / "rank3.json.gz").write_bytes(gzip.compress(b"[]"))
    (folder / "config.resolved.toml").write_text("name = ")
    (folder / "summary.json").write_text("{")
    run = collect(folder)
    assert len(run.steps) == 6
    assert len(run.ranks[1].steps) == 6
    assert [trace.rank for trace in run.traces] == [0, 1]
    for name in (
        "metrics.jsonl",
        "events/rank1.jsonl",
        "rank2.json.gz",
        "rank3.json.gz",
        "config.resolved",
        "summary",
    ):
        assert any(name in line for line in run.missing), name


def test_times_of_the_host_are_not_passed_off_as_those_of_gpus(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    assert not [line for line in collect(run).missing if "GPU" in line]
    path = run / "trace/rank0.json.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"gloo"', b'"nccl"')))
    said = [line for line in collect(run).missing if "GPU" in line]
    assert len(said) == 2 and "stands in optim" in said[0] and "bytes" in said[1]


def test_a_step_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "loss": 5.0},
        {"step": 1, "loss": 4.0},
        {"step": 1, "loss": 4.5},
        {"step": "x"},
        {"loss": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [record["loss"] for record in collect(tmp_path).steps] == [5.0, 4.5]


def test_a_run_resumed_under_another_plan_is_measured_by_the_steps_since(tmp_path: Path) -> None:
    """Else bytes that no step ever sent, and times of the old plan beside the price of the new one."""
    folder = write_run(tmp_path / "run", dp=2, pp=2, steps=20)
    with (folder / "events/rank0.jsonl").open("a") as events:
        events.write('{"kind":"info","rank":0,"host":"laptop","coords":{"pp":0,"dp":0}}\n')
    assert len(collect(folder).ranks) == 4, "it has not made a step yet"
    line = '{"kind":"step","step":%d,"rank":0,"time":{"forward":0.5},"bytes":{"tp.send":7}}\n'
    with (folder / "events/rank0.jsonl").open("a") as events:
        events.writelines(line % step for step in range(20, 24))
    run = collect(folder)
    assert [facts.rank for facts in run.ranks] == [0] and not run.ranks[0].place
    assert [share.wall for share in analyse.shares(run)] == [0.5]
    assert analyse.bytes_table(run) == [("tp", "send", 7.0)]
    assert len(run.steps) == 20, "the curves show all of it"


def test_validations_come_from_metrics_and_summary(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 9, "loss": 3.0},
        {"step": 9, "val_loss": 3.5},
        {"step": 1, "loss": 4.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text('{"val": [[20, 2.5], [30, null], 7]}')
    run = collect(tmp_path)
    assert [record["loss"] for record in run.steps] == [4.9, 3.0]
    assert run.validation == [(9.0, 3.5), (20.0, 2.5)]


def test_a_run_is_found_from_its_parents(tmp_path: Path) -> None:
    old, new = tmp_path / "demo" / "a", tmp_path / "demo" / "b"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
    assert run_folder(new) == new
    (tmp_path / "demo" / "latest").symlink_to("a")
    assert run_folder(tmp_path / "demo") == old
    (tmp_path / "demo" / "latest").unlink()
    (tmp_path / "demo" / "latest").write_text("b\n")
    assert run_folder(tmp_path / "demo") == new
    (tmp_path / "demo" / "latest").unlink()
    assert run_folder(tmp_path) in (old, new)
    with pytest.raises(UsageError, match="no such run folder"):
        run_folder(tmp_path / "nowhere")
    (tmp_path / "void").mkdir()
    with pytest.raises(UsageError, match="holds no run"):
        run_folder(tmp_path / "void")


def test_without_events_rank_0_speaks_for_the_run(tmp_path: Path) -> None:
    line = {"step": 0, "loss": 1.0, "time": {"forward": 1.0, "backward": 2.0, "comm_exposed": None}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (share,) = analyse.shares(collect(tmp_path))
    assert share.wall == 3.0


def test_many_ranks_are_grouped() -> None:
    found = [analyse.TimeShares(f"rank {r}", "", {"forward": float(r)}) for r in range(100)]
    groups = analyse.grouped(found, 48)
    assert len(groups) <= 48
    assert groups[0].name == "ranks 0 to 2"
    assert groups[0].wall == pytest.approx(1.0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(ys: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = picture.thin(points, 100)
    assert len(kept) <= 102
    assert kept == sorted(kept)
    assert {min(ys), max(ys)} <= {y for _, y in kept}


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, wide: float) -> None:
    found = picture.ticks(low, low + wide)
    slack = 1e-6 * max(1, abs(low), wide)
    assert len(found) <= 12
    assert all(low - slack <= t <= low + wide + slack for t in found)


@given(st.integers(3, 400), st.floats(-5, 5), st.floats(-5, 5))
def test_smoothing_leaves_a_straight_line_alone(count: int, start: float, slope: float) -> None:
    points = [(float(i), start + slope * i) for i in range(count)]
    for (_, y), (_, expected) in zip(picture.smooth(points, 10), points, strict=True):
        assert y == pytest.approx(expected, abs=1e-6)


def test_numbers_as_people_read_them() -> None:
    assert [words.seconds(s) for s in (3e-6, 0.139, 2.345, 600, 3900)] == [
        "3 µs",
        "139 ms",
        "2.35 s",
        "10 min",
        "1 h 05 min",
    ]
    assert [words.nbytes(n) for n in (512, 1229, 35_651_584)] == ["512 B", "1.2 KiB", "34 MiB"]
    assert [words.count(n) for n in (0, 940, 28_911, 1_234_567)] == ["0", "940", "28.9k", "1.23M"]
    assert [words.percent(f) for f in (0, 0.0312, 0.82, 1)] == ["0 %", "3.1 %", "82 %", "100 %"]


@pytest.mark.timeout(60)
def test_neither_torch_nor_pillow_is_imported_early() -> None:
    code = "import sys, unisono.report.page; sys.exit(bool({'torch', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

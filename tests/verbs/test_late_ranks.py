"""A run says once, while it goes on, which rank holds the others up."""

import json
import math
import time
from pathlib import Path

import pytest

from tests.report.late import Late, lines, nobody
from tests.verbs.jobs import unisono
from unisono.verbs.train.late_ranks import LateRanks

pytestmark = pytest.mark.timeout(60)


class Going:
    """A run whose ranks write their lines as it goes on, and what was said of it."""

    def __init__(self, folder: Path, late: Late, steps: int) -> None:
        (folder / "events").mkdir()
        self.files = [(folder / f"events/rank{rank}.jsonl").open("w") for rank in range(4)]
        for rank, file in enumerate(self.files):
            file.write(json.dumps({"kind": "info", "rank": rank, "coords": {"dp": rank}}) + "\n")
        self.lines, self.ranks, self.said = iter(lines(late, steps=steps)), LateRanks(folder), list[str]()

    def on(self, steps: int) -> None:
        """So many steps, a look, and what it has to say."""
        for _ in range(steps):
            for file, line in zip(self.files, next(self.lines), strict=True):
                file.write(json.dumps(line) + "\n")
        for file in self.files:
            file.flush()
        for _ in range(2):  # begin it; hear of it
            if math.isfinite(self.ranks._due):
                self.ranks._due = 0.0
            self.said += self.ranks.news()
            if self.ranks._thread is not None:
                self.ranks._thread.join()


def test_it_is_said_once_and_soon(tmp_path: Path) -> None:
    late = lambda step, rank: (0.2, "backward", "blocks.1.mlp") if rank == 2 and step > 20 else (0.0, "", "")
    run = Going(tmp_path, late, 120)
    run.on(20)
    assert run.said == []
    for _ in range(10):
        run.on(10)
    (text,) = run.said
    assert text.startswith("rank 2 is late in backward, in blocks.1.mlp, since step 21: the others wait")


def test_nothing_of_healthy_ranks_and_of_those_that_take_turns(tmp_path: Path) -> None:
    for name, late in (
        ("well", nobody),
        ("turns", lambda s, r: (0.2, "data", "") if s % 4 == r else (0.0, "", "")),
    ):
        (tmp_path / name).mkdir()
        run = Going(tmp_path / name, late, 100)
        for _ in range(5):
            run.on(20)
        assert run.said == []


def test_looks_are_apart(tmp_path: Path) -> None:
    run = Going(tmp_path, nobody, 10)
    assert run.ranks.news() == [] and run.ranks._thread is not None
    run.ranks._thread.join()
    assert run.ranks._due > time.monotonic() + 1
    begun = run.ranks._thread
    run.ranks.news()
    assert run.ranks._thread is begun


def test_what_cannot_be_read_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Going(tmp_path, nobody, 40)
    monkeypatch.setattr("unisono.verbs.train.late_ranks.stragglers", lambda steps: 1 / 0)
    run.on(20)
    run.on(20)
    assert len(run.said) == 1 and "ZeroDivisionError" in run.said[0]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_names_a_rank_that_is_late_in_the_backward_of_a_module(tmp_path: Path) -> None:
    lag = "lag:who=1:step=6:part=backward:module=blocks.0.mlp"
    keys = [
        "--train.steps",
        "60",
        "--train.eval_every",
        "0",
        "--train.save_every",
        "0",
        "--out.report",
        "false",
    ]
    done = unisono(
        tmp_path, "train", "--plan", "dp=3", "--train.global_batch", "6", "--chaos", lag, *keys, "--no-color"
    )
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "is late" in line]
    assert line.startswith("note  rank 1 is late in backward, in blocks.0.mlp, since step ")

"""What is followed while it is written is, at every moment, what the report reads of the same folder."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono.observe.metrics import forget_after
from unisono.report.analyse import analyse
from unisono.report.collect import collect
from unisono_contrib.report.dash import follow, panels
from unisono_contrib.report.dash.follow import FollowedRun


def grown(source: Path, folder: Path, shares: list[float]) -> list[float]:
    """Files of a run cut at a share of their bytes, wherever that is."""
    for path in (*source.glob("events/*"), source / "metrics.jsonl"):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        begin = target.stat().st_size if target.exists() else 0
        with target.open("ab") as file:
            file.write(content[begin : int(len(content) * shares[0])])
    return shares[1:]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_grows_is_what_the_report_reads(tmp_path: Path, seed: int) -> None:
    luck = random.Random(seed)
    source = write_run(tmp_path / "whole", dp=2, pp=2, steps=60, straggler=3, seed=seed)
    folder = tmp_path / "growing"
    folder.mkdir()
    for name in ("config.resolved.toml", "env.json"):
        shutil.copy(source / name, folder)
    run, shares = FollowedRun(folder), [*sorted(luck.random() for _ in range(7)), 1.0]
    while shares:
        shares = grown(source, folder, shares)
        run.turn(at_once=True)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    run.turn(at_once=True)
    followed, read = run.record(), collect(folder)
    assert [step["loss"] for step in followed.steps] == [step["loss"] for step in read.steps]
    assert [rank.coords for rank in followed.ranks] == [rank.coords for rank in read.ranks]
    assert [[s["time"] for s in r.steps] for r in followed.ranks] == [
        [s["time"] for s in r.steps] for r in read.ranks
    ]
    assert analyse(followed).verdict.cause == analyse(read).verdict.cause
    assert not run.late.unread(1, 55)


def test_of_long_runs_the_latest_steps_are_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "KEPT", 60)
    run = FollowedRun(write_run(tmp_path / "run", dp=3, steps=100))
    run.turn(at_once=True)
    assert [[step["step"] for step in rank.steps] for rank in run.record().ranks] == [[*range(80, 100)]] * 3
    assert {rank: line["step"] for rank, line in run.lines_of(7).items()} == {0: 7, 1: 7, 2: 7}
    assert len(run.record().steps) == 100


def test_steps_that_are_passed_over_are_read_when_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_PARSED", 40)
    monkeypatch.setattr(follow.RankTail, "newest", lambda tail: tail.between(99, 99) or _last(tail))
    run = FollowedRun(write_run(tmp_path / "run", dp=2, steps=100))
    run.turn(at_once=True)
    assert run.every > 1 and len(run.late.unread(1, 95)) > 70
    run.refine(20, 40)
    assert run.late.unread(20, 40) == [] and run.late.unread(41, 95)


def _last(tail: follow.RankTail) -> list[dict]:
    return [{"kind": "step", "step": 99, "time": {}}]


def test_a_run_that_goes_on_from_a_checkpoint_forgets_what_came_after(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", dp=2, steps=50)
    run = FollowedRun(folder)
    run.turn(at_once=True)
    for path in (*folder.glob("events/*"), folder / "metrics.jsonl"):
        forget_after(path, 30)
    run.turn(at_once=True)
    assert max(step["step"] for step in run.record().steps) == 30
    assert run.late.steps <= 30 and run.late.unread(1, 25) == []


@pytest.mark.parametrize("case", ["empty", "no ranks", "damaged", "pipe"])
def test_whatever_is_left_of_a_run_is_shown(tmp_path: Path, case: str) -> None:
    folder = write_run(tmp_path / "run", dp=2, steps=9)
    if case == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    if case == "no ranks":
        shutil.rmtree(folder / "events")
    if case == "damaged":
        for path in folder.rglob("*.json*"):
            path.write_bytes(b"\x00\xff{" * 9 + b"\n[]\nnull\n")
    if case == "pipe":
        (folder / "events" / "rank1.jsonl").unlink()
        os.mkfifo(folder / "events" / "rank1.jsonl")
    run = FollowedRun(folder)
    run.turn(at_once=True)
    record = run.record()
    facts = analyse(record)
    shown = [*panels.figures(record, facts, 0.0), *panels.means(record, facts)]
    assert {"head", "tiles", "loss", "members", "faults"} <= {panel["id"] for panel in shown}

"""A tracker has each point of the run folder once, whatever failed on the way, and however the run was resumed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from unisono.observe.metrics import JsonLines, forget_after, read_steps
from unisono_contrib.trackers import Point, TrackedRun, Tracker, TrackerConnection, mirror
from unisono_contrib.trackers.mirror import TrackerMirror


@dataclass
class Paper:
    """What a tracker keeps: points by key of a run, as they came. fails: the chance that a call fails."""

    fails: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    runs: dict[str, list[tuple[int, str, float]]] = field(default_factory=dict)
    state: str = ""

    def may_fail(self) -> None:
        if self.draw.random() < self.fails:
            raise ConnectionError("the line is dead")


class _Connection(TrackerConnection):
    def __init__(self, paper: Paper, key: str) -> None:
        self.paper, self.key = paper, key
        paper.may_fail()

    def held(self, after: int) -> Mapping[int, Mapping[str, float]]:
        self.paper.may_fail()
        held: dict[int, dict[str, float]] = {}
        for step, name, value in self.paper.runs.get(self.key, []):
            if step > after:
                held.setdefault(step, {})[name] = value
        return held

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():  # it may die between two numbers of a step
                self.paper.may_fail()
                self.paper.runs.setdefault(self.key, []).append((point.step, name, value))
        self.paper.may_fail()

    def received(self, sent: int) -> int:
        return max(0, sent - self.paper.draw.choice((0, 2, 4)))

    def describe(self, run: TrackedRun) -> None:
        self.paper.may_fail()
        self.paper.state = run.state

    def forget(self) -> None:
        self.paper.runs.pop(self.key, None)
        self.paper.may_fail()


class PaperTracker(Tracker):
    """Points on paper."""

    name = "paper"
    needs = ()
    extra = ""
    paper: object

    def connect(self, run: TrackedRun) -> TrackerConnection:
        assert isinstance(self.paper, Paper)
        return _Connection(self.paper, run.key)


def written(folder: Path, first: int, last: int, shift: float = 0.0) -> None:
    """Steps first .. last of a run whose losses are moved by `shift`; timings are never the same."""
    clock = random.Random(f"{folder}{first}{last}{shift}")
    with JsonLines(folder / "metrics.jsonl") as lines:
        for step in range(first, last + 1):
            lines.write({"step": step, "loss": 5.0 - step / 64 + shift, "lr": 0.001, "tokens": 640,
                         "tokens_per_s": 500.0 + 100 * clock.random(), "time": {"forward": clock.random()}})  # fmt: skip


def steps(folder: Path, paper: Paper) -> dict[int, dict[str, float]]:
    """What the only run on paper has, where no point is there twice."""
    (points,) = paper.runs.values()
    named = [(step, name) for step, name, _ in points]
    assert len(set(named)) == len(named)
    held: dict[int, dict[str, float]] = {}
    for step, name, value in points:
        held.setdefault(step, {})[name] = value
    return held


@pytest.mark.parametrize("seed", range(6))
def test_each_point_comes_once_whatever_fails_and_whoever_is_killed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "BATCH", 3)
    draw = random.Random(seed)
    paper = Paper(0.04, draw)
    folder = tmp_path / "demo" / "run"
    folder.mkdir(parents=True)
    follower, step, shift = TrackerMirror(PaperTracker(paper=paper), folder), 0, 0.0
    for _ in range(30):
        match draw.choice(("train", "train", "train", "resume", "other", "kill", "lost")):
            case "train":
                written(folder, step + 1, step + 5, shift)
                step += 5
            case "resume":
                step = draw.randint(max(0, step - 7), step)
                forget_after(folder / "metrics.jsonl", step)
            case "other" if step:  # resumed under another learning rate
                step, shift = draw.randint(max(0, step - 7), step), shift + 1.0
                forget_after(folder / "metrics.jsonl", step)
            case "kill":
                follower = TrackerMirror(PaperTracker(paper=paper), folder)
            case "lost" if follower.cursor.generation == 1:
                (folder / "trackers" / "paper.json").unlink(missing_ok=True)
                follower = TrackerMirror(PaperTracker(paper=paper), folder)
        try:
            follower.catch_up()
        except ConnectionError:
            follower.drop()
    written(folder, step + 1, step + 2, shift)
    paper.fails = 0.0
    follower.catch_up(final=True)
    paper.runs = {key: points for key, points in paper.runs.items() if key == max(paper.runs, key=_age)}
    held = steps(folder, paper)
    lines = read_steps(folder / "metrics.jsonl")[0]
    assert {step: values["loss"] for step, values in held.items()} == {
        line["step"]: line["loss"] for line in lines
    }
    assert all(
        set(values) == {"loss", "lr", "tokens", "tokens_per_s", "time/forward"} for values in held.values()
    )


def _age(key: str) -> int:
    return int(key.removeprefix("demo-run").removeprefix("-") or 1)


def test_a_resumed_run_that_makes_the_same_steps_again_sends_none_of_them_twice(tmp_path: Path) -> None:
    paper, folder = Paper(), tmp_path / "demo" / "run"
    written(folder, 1, 8)
    follower = TrackerMirror(PaperTracker(paper=paper), folder)
    follower.catch_up()
    forget_after(folder / "metrics.jsonl", 5)
    follower.catch_up()
    written(folder, 6, 7)
    follower.catch_up()
    assert len(steps(folder, paper)) == 8  # the eighth is on its way
    written(folder, 8, 10)
    follower.catch_up(final=True)
    assert sorted(steps(folder, paper)) == [*range(1, 11)] and follower.cursor.generation == 1


def test_a_run_that_goes_on_with_other_numbers_is_rewritten(tmp_path: Path) -> None:
    paper, folder = Paper(), tmp_path / "demo" / "run"
    written(folder, 1, 8)
    TrackerMirror(PaperTracker(paper=paper), folder).catch_up(final=True)
    forget_after(folder / "metrics.jsonl", 5)
    written(folder, 6, 9, shift=1.0)
    TrackerMirror(PaperTracker(paper=paper), folder).catch_up(final=True)
    assert [*paper.runs] == ["demo-run-2"]
    held = steps(folder, paper)
    assert held[5]["loss"] == 5.0 - 5 / 64 and held[6]["loss"] == 6.0 - 6 / 64 and len(held) == 9


def test_a_run_that_ends_before_the_step_it_was_resumed_from_is_rewritten(tmp_path: Path) -> None:
    paper, folder = Paper(), tmp_path / "demo" / "run"
    written(folder, 1, 8)
    follower = TrackerMirror(PaperTracker(paper=paper), folder)
    follower.catch_up()
    forget_after(folder / "metrics.jsonl", 5)
    follower.catch_up(final=True)
    assert sorted(steps(folder, paper)) == [1, 2, 3, 4, 5]

"""Trackers that refuse, hang, die or are not there cost a run nothing, say so once, and have all of it afterwards."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trackers.paper import PaperServer, served
from unisono.spec.sink import SINKS, Observer
from unisono.train.sinks.metrics import MetricsSink
from unisono_contrib.trackers import Tracker, follow, follower
from unisono_contrib.verify.conformance.sink import facts, records

SINK = f"{Path(__file__).with_name('paper.py')}:PaperTracker"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server() -> Iterator[PaperServer]:
    with served() as server:
        yield server


class Run:
    """A run of some steps whose tracker is on paper. notes: what the user read."""

    def __init__(self, folder: Path, server: PaperServer) -> None:
        self.folder, self.notes = folder, list[str]()
        run = replace(facts(folder), note=self.notes.append)
        self.metrics, self.tracker = MetricsSink().open(run), tracker_at(server).open(run)
        self.slowest = 0.0

    def step(self, first: int, last: int) -> None:
        """Make steps, as a session does."""
        steps = records(first, last)
        self.metrics.observe(steps)
        begun = time.perf_counter()
        self.tracker.observe(steps)
        self.slowest = max(self.slowest, time.perf_counter() - begun)

    def wait(self, until: str) -> None:
        """Look until the tracker's follower has said so."""
        while not any(until in note for note in self.notes):
            self.tracker.observe(records(1, 1))
            time.sleep(0.01)

    def end(self) -> None:
        self.metrics.close()
        self.tracker.close()


def tracker_at(server: PaperServer) -> Tracker:
    tracker = SINKS.read(f"{SINK}:url={server.url}")
    assert isinstance(tracker, Tracker)
    return tracker


def steps_at(server: PaperServer) -> list[int]:
    """The steps that the server has, where no number is there twice."""
    points = [point for run in server.runs.values() for point in run]
    assert len({(step, name) for step, name, _ in points}) == len(points)
    return sorted({step for step, _, _ in points})


def sync(server: PaperServer, folder: Path) -> dict[str, object]:
    """`unisono sync`, as far as it is not flags."""
    process = follower.start(tracker_at(server), folder, grace=20.0)
    process.finish()
    assert process.wait(30.0)
    process.kill()
    return process.end


def test_a_tracker_that_answers_has_all_of_a_run_when_it_ends(tmp_path: Path, server: PaperServer) -> None:
    run = Run(tmp_path / "demo" / "run", server)
    run.step(1, 5)
    assert server.asked.acquire(timeout=20.0)
    run.step(6, 9)
    run.end()
    assert steps_at(server) == [*range(1, 10)] and run.notes == []
    assert server.described["demo-run"][3]["run"] == "demo/run"


@pytest.mark.parametrize("mood", ["refuses", "hangs", "deaf", "dead"])
def test_one_that_fails_is_told_of_once_and_catches_up(
    mood: str, tmp_path: Path, server: PaperServer
) -> None:
    run = Run(tmp_path / "demo" / "run", server)
    if mood == "dead":
        server.server_close()
    server.mood = mood
    run.step(1, 5)
    run.wait("paper is behind")
    run.step(6, 9)
    begun = time.monotonic()
    run.end()
    assert time.monotonic() - begun < follower.GRACE  # one that failed is not waited for
    assert len(run.notes) == 1 and f"unisono sync {run.folder} --to paper" in run.notes[0]
    server.free.set()
    with served() as other:
        other.runs = server.runs  # it is back, at another port
        assert sync(other, run.folder) == {"sent": 9, "steps": 9, "error": ""}
        assert sync(other, run.folder) == {"sent": 9, "steps": 9, "error": ""}
        assert steps_at(other) == [*range(1, 10)]


def test_one_that_fails_for_a_while_catches_up_by_itself(tmp_path: Path, server: PaperServer) -> None:
    run = Run(tmp_path / "demo" / "run", server)
    server.mood = "deaf"  # what it was sent is there: it never said so
    run.step(1, 5)
    run.wait("paper is behind")
    server.mood = "well"
    server.free.set()
    run.step(6, 9)
    while len({step for points in server.runs.values() for step, _, _ in points}) < 9:
        time.sleep(0.02)
    run.end()
    assert steps_at(server) == [*range(1, 10)] and len(run.notes) == 1


def test_a_step_does_not_wait_for_a_follower(tmp_path: Path, server: PaperServer) -> None:
    server.mood = "hangs"
    run = Run(tmp_path / "demo" / "run", server)
    seen: list[bool] = []
    for step in range(1, 200):
        run.step(step, step)
        seen.append(run.tracker._follower.process.stdin is not None)  # type: ignore[attr-defined]
    assert all(seen)  # nothing was written to it, so nothing can be full
    run.tracker._follower.kill()  # type: ignore[attr-defined]


def test_a_run_that_is_killed_leaves_no_follower(tmp_path: Path, server: PaperServer) -> None:
    server.mood = "hangs"
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from unisono.spec.sink import SINKS\n"
        "from unisono_contrib.verify.conformance.sink import facts, records\n"
        f"observer = SINKS.read('{SINK}:url={server.url}').open(facts(Path('{tmp_path}')))\n"
        "print(observer._follower.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    pid = int(done.stdout)
    until = time.monotonic() + follower.GRACE + 10.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_disk_that_is_full_is_a_tracker_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run_dir = tmp_path / "demo" / "run"
    notes: list[str] = []
    run = replace(facts(run_dir), note=notes.append)
    metrics = MetricsSink().open(run)
    metrics.observe(records(1, 5))
    (run_dir / "tensorboard").symlink_to("/dev/full")  # no room there, whatever is written
    tracker: Observer = SINKS.read("tensorboard").open(run)
    while not notes:
        tracker.observe(records(1, 1))
        time.sleep(0.01)
    tracker.close()
    assert len(notes) == 1 and "tensorboard is behind" in notes[0]
    (run_dir / "tensorboard").unlink()
    end = follower.start(SINKS.read("tensorboard"), run_dir, grace=20.0)  # type: ignore[arg-type]
    end.finish()
    assert end.wait(30.0) and end.end["sent"] == 5
    end.kill()


def test_two_followers_of_one_run_take_turns(tmp_path: Path) -> None:
    with follow._alone(tmp_path, "paper") as first, follow._alone(tmp_path, "paper") as second:
        assert first.taken() and not second.taken()

"""The run's side of a follower: rank 0 starts it, hears it, and ends it with the run. Nothing here waits in a step."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.spec.sink import Observer, RunFacts, StepRecord
from unisono_contrib.trackers import Tracker
from unisono_contrib.trackers.mirror import FOLDER

PATIENCE = 15.0  # seconds after which a call that does not return counts as hung
GRACE = 10.0  # seconds that a follower has after the end of the run
LAST = 1.0  # seconds in which a process that was killed has gone, but for one in a wait that no signal ends


@dataclass(slots=True)
class FollowerProcess:
    """A follower that was started. behind: what it said of a tracker that fails; end: its last words."""

    process: subprocess.Popen[bytes]
    behind: str = ""
    end: dict[str, Any] = field(default_factory=dict)
    _left: bytes = b""

    def hear(self) -> None:
        """Take in what it has said, without waiting."""
        if self.process.stdout is None:
            return
        with suppress(BlockingIOError, OSError):
            while data := os.read(self.process.stdout.fileno(), 65536):
                self._left += data
        *lines, self._left = self._left.split(b"\n")
        for line in lines:
            with suppress(ValueError):
                said = json.loads(line)
                self.behind = said.get("behind", self.behind)
                self.end = said.get("end", self.end)

    def finish(self) -> None:
        """Tell it that the run is over."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Whether it has gone within some seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.hear()
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it, and whatever a tracker's library has started, and let go of its pipes. One that waits for a disk that
        is gone dies when that wait ends, and nobody waits for it."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait(LAST)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start(
    tracker: Tracker, folder: Path, patience: float = PATIENCE, grace: float = GRACE, brief: bool = False
) -> FollowerProcess:
    """A follower of a run folder. brief: after the run it leaves at once if the tracker fails. Raises OSError."""
    order = {"folder": str(folder.absolute()), "tracker": tracker.text(), "patience": patience, "grace": grace,
             "brief": brief}  # fmt: skip
    log = folder / FOLDER / f"{tracker.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono_contrib.trackers.follow", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the run, which tells the follower
        )
    if process.stdout is not None:
        os.set_blocking(process.stdout.fileno(), False)
    return FollowerProcess(process)


def following(tracker: Tracker, run: RunFacts) -> Observer:
    """The observer of a tracker, which has its follower."""
    return _Following(tracker.name, start(tracker, run.run_dir, brief=True), run.run_dir, run.note)


class _Following(Observer):
    """The run folder is what a follower reads, so there is nothing to hand over; its one warning is passed on."""

    def __init__(
        self, name: str, follower: FollowerProcess, folder: Path, note: Callable[[str], None]
    ) -> None:
        self._name, self._follower, self._folder, self._note = name, follower, folder, note
        self._warned = False

    def observe(self, steps: Sequence[StepRecord]) -> None:
        follower = self._follower
        gone = follower.process.poll() is not None
        follower.hear()
        self._warn(
            follower.behind or (gone and f"its process has ended; {FOLDER}/{self._name}.log says why") or ""
        )

    def close(self) -> None:
        """Let it send the rest. A tracker that failed before is not waited for."""
        follower = self._follower
        follower.hear()
        follower.finish()
        until = time.monotonic() + GRACE + 1.0
        while not follower.wait(0.1) and not follower.behind and time.monotonic() < until:
            pass
        whole = follower.process.poll() == 0
        follower.kill()
        if not whole:
            self._warn(follower.behind or f"it did not take all within {GRACE:g} s")

    def _warn(self, why: str) -> None:
        if why and not self._warned:
            self._warned = True
            self._note(
                f"{self._name} is behind: {why}; training goes on, and the run folder has all of it:"
                f" unisono sync {self._folder} --to {self._name}"
            )

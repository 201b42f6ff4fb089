"""The follower: a process that sends what stands in a run folder to one tracker. No torch.

    python -m unisono_contrib.trackers.follow '{"folder": "runs/a/2026", "tracker": "mlflow", ...}'

It follows until its standard input ends, which happens when the run ends, however it ends; then it sends the rest and
leaves, after `grace` seconds at the latest. It says, a JSON object a line:

    {"behind": "ConnectionError: ..."}                                     once, when the tracker fails or hangs
    {"end": {"sent": 200, "steps": 200, "error": ""}}                      the last line
"""

import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.observe.files import lock_now
from unisono.spec.doubtful import plain
from unisono_contrib.trackers import Tracker
from unisono_contrib.trackers.mirror import FOLDER, TrackerMirror

POLL = 1.0  # seconds between two looks at the run folder
LONGEST_WAIT = 30.0  # seconds between two tries to reach a tracker
_QUIET = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
          "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true"}  # fmt: skip
"""Trackers of one request, not of many: the follower tries again itself, and it is never in a hurry."""


class Follower:
    """Brings one tracker up to date again and again, in a thread of its own, so that a call that hangs is noticed."""

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.mirror = TrackerMirror(tracker, folder)
        self.over = threading.Event()  # the run is over: one more pass, and the end
        self.whole = threading.Event()
        self.error = ""
        self.since: float | None = None  # monotonic seconds at which the pass under way began

    def run(self) -> None:
        """Until the run is over and the tracker has all of it."""
        wait = POLL
        while not self.whole.is_set():
            final = self.over.is_set()
            self.since = time.monotonic()
            try:
                self.mirror.catch_up(final)
            except Exception as error:  # whatever a tracker's library raises: the run is not to hear of it
                self.mirror.drop()
                self.error = plain(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
                wait = min(LONGEST_WAIT, 2.0 * wait)
            else:
                self.error, wait = "", POLL
                if final:
                    self.whole.set()
            self.since = None
            if not self.whole.is_set():
                self.over.wait(wait) if not final else time.sleep(min(wait, POLL))

    def trouble(self, patience: float) -> str:
        """Why the tracker is behind; "" where it is not."""
        since = self.since
        if since is not None and time.monotonic() - since > patience:
            return f"no answer for {patience:g} s"
        return self.error


def main(argument: str) -> int:
    """Follow as the argument says; the exit code: 0 where the tracker has all of the run, else 1."""
    from unisono.spec.sink import SINKS

    order = json.loads(argument)
    tracker = SINKS.read(order["tracker"])
    if not isinstance(tracker, Tracker):
        raise ValueError(f"{order['tracker']} is no tracker")
    _prepare()
    folder = Path(order["folder"])
    begun, parent, behind = None, os.getppid(), ""
    with _alone(folder / FOLDER, tracker.name) as lock:
        follower = Follower(tracker, folder)
        thread = threading.Thread(target=follower.run, daemon=True)
        while not follower.whole.wait(0.02 if follower.over.is_set() else 0.0):
            if not thread.is_alive() and lock.taken():
                thread.start()
            if not follower.over.is_set() and (_ended(POLL / 4) or os.getppid() != parent):
                follower.over.set()
                begun = time.monotonic()
            if not behind and (behind := follower.trouble(order["patience"])):
                _say({"behind": behind})
            if begun is not None and (
                time.monotonic() - begun > order["grace"] or (behind and order["brief"])
            ):
                break
        whole = follower.whole.is_set()
        steps = follower.mirror.steps.last
        _say({"end": {"sent": steps if whole else follower.mirror.cursor.safe, "steps": steps,
                      "error": "" if whole else follower.trouble(0.0)}})  # fmt: skip
    return 0 if whole else 1


class _alone:
    """One follower a tracker and run folder: the second waits until the first has gone."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def taken(self) -> bool:
        """Whether this process is the one; it is until it ends."""
        return lock_now(self._fd)

    def __enter__(self) -> "_alone":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _ended(seconds: float) -> bool:
    """Whether standard input has ended within some seconds."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)


def _say(line: Mapping[str, Any]) -> None:
    try:
        os.write(1, (json.dumps(line) + "\n").encode())
    except OSError:  # nobody is there to hear it
        pass


def _prepare() -> None:
    """Last in line for a core; without torch, which some trackers import if it is there, and which takes seconds."""
    os.nice(10)
    sys.modules["torch"] = None  # type: ignore[assignment]
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    code = main(sys.argv[1])
    os._exit(code)  # a call that hangs, or a thread of a library, keeps nobody here

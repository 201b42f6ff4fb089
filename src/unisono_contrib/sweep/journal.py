"""A sweep's folder: its journal `trials.jsonl`, one object a line, and the lock that keeps a second sweep out.

    {"event": "new", "trial": 3, "params": {"train.lr": 0.01}}
    {"event": "start", "trial": 3, "until": 40}              also "source": [trial, step] and "params" by method pbt
    {"event": "value", "trial": 3, "step": 40, "value": 1.2, "run_dir": "runs/lr/trial-003/ID", "seconds": 4.1}
    {"event": "failure", "trial": 3, "why": "killed by SIGKILL"}    a piece, which is tried again
    {"event": "stopped", "trial": 3}                         the sweep was, and this piece with it
    {"event": "end", "trial": 3, "state": "done"}            or pruned, or failed

Lines are appended whole, before what they say is done or after it is known. What was under way when the sweep was
killed has a start without an end, and is tried again.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.observe.files import Appender, lock_now, write_whole
from unisono.spec.doubtful import TEXT, read_text
from unisono.spec.errors import UsageError

TRIALS, SWEEP = "trials.jsonl", "sweep.json"


class SweepJournal:
    """The journal of a sweep, open to be written. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._file = Appender(folder / TRIALS)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a sweep's journal; none where there is no journal."""
    read = []
    with suppress(FileNotFoundError):
        for text in (folder / TRIALS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):  # cut short by a kill
                line = json.loads(text)
                if isinstance(line, dict) and "event" in line:
                    read.append(line)
    return read


def held_to(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Write down what a new sweep searches; compare it where the folder holds a sweep. Raises UsageError C06."""
    file, text = folder / SWEEP, json.dumps(wanted, indent=1, sort_keys=True, default=str)
    if not file.exists():
        write_whole(file, text)
        return
    known, now = json.loads(read_text(file, TEXT)), json.loads(text)
    differ = sorted(key for key in {*known, *now} if known.get(key) != now.get(key))
    if differ:
        raise UsageError(
            f"{folder} holds another sweep: {', '.join(differ)} differ", where=str(file), code="C06",
            likely="the recipe, a flag or the space was changed since",
            fix="--out FOLDER for a new sweep, or the sweep as it was; trials, workers and retries may change",
        )  # fmt: skip


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder; the kernel lets go of it however this process ends. Raises UsageError O02."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not lock_now(handle):
            raise UsageError(
                f"another sweep is at work in {folder}", where=str(folder), code="O02",
                fix="wait for it, or --out FOLDER elsewhere",
            )  # fmt: skip
        yield
    finally:
        os.close(handle)

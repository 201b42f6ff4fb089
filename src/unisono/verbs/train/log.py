"""`log.jsonl` of a run: what ranks printed and what was noted of them, a line each, for who looks later."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.launch.screen import words_of
from unisono.observe.metrics import JsonLines
from unisono.spec.runs import LOG

_MOST = 64 << 20  # bytes: a rank that prints without end fills no disk
_EARLY = 1000  # lines that wait for a folder


class RunLog:
    """Hears the events of a run; writes those that are words for people, once a folder may have them. A disk that is
    full loses lines, and stops nothing."""

    def __init__(self) -> None:
        self._early: list[dict[str, Any]] = []
        self._lines: JsonLines | None = None
        self._room = _MOST

    def hear(self, rank: int, event: Mapping[str, Any], folder: Path | None) -> None:
        """Take in an event of a rank, of -1 where it is of the run. folder: None while nothing may be written."""
        if text := words_of(event):
            self._early.append(
                {"at": round(time.time(), 3), "rank": rank, "kind": event["kind"], "text": text}
            )
            del self._early[:-_EARLY]
        self._write(folder)

    def close(self, folder: Path | None) -> None:
        """Nothing is written any more, after what waits for a folder."""
        self._write(folder)
        if self._lines is not None:
            self._lines.close()
            self._lines, self._room = None, 0

    def _write(self, folder: Path | None) -> None:
        if folder is not None and self._early and self._room > 0:
            with contextlib.suppress(OSError):
                self._lines = self._lines or JsonLines(folder / LOG)
                self._lines.write(*self._early)
                self._room -= sum(len(line["text"]) + 60 for line in self._early)
                if self._room <= 0:
                    what = f"{LOG} is full: nothing is written to it any more"
                    self._lines.write({**self._early[-1], "rank": -1, "kind": "note", "text": what})
            self._early.clear()

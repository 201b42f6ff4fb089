"""The last steps of a run that is still going, read from the ends of its ranks' files: each look reads what is new."""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.report.calls import RankStep, StepCalls, rank_step

WINDOW = 256
"""Steps that are kept."""
_FIRST = 1 << 20  # bytes of a file that was there before the first look


@dataclass
class _RankTail:
    """One rank's file. at: bytes that were read. half: of a line, whose rest is still to come."""

    path: Path
    at: int = 0
    half: bytes = b""
    place: dict[str, int] = field(default_factory=dict)
    steps: deque[RankStep] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def read(self, rank: int) -> None:
        """Take in what was written since the last time. Raises OSError."""
        for line in self._lines():
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(said, dict):
                continue
            if said.get("kind") == "info":  # a start: steps of before are another plan's, or are made again
                self.steps.clear()
                coords = said.get("coords")
                self.place = coords if isinstance(coords, dict) else {}
            elif (step := rank_step(rank, said)) is not None:
                self.steps.append(step)

    def _lines(self) -> Iterator[bytes]:
        size = self.path.stat().st_size
        if size < self.at:  # it was written anew
            self.at, self.half = 0, b""
            self.steps.clear()
        if not self.at:
            self._begin(size)
        with self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read()
        self.at += len(data)
        *lines, self.half = (self.half + data).split(b"\n")
        yield from lines

    def _begin(self, size: int) -> None:
        """Where the first look starts; the place of the rank stands in the first line."""
        if size > _FIRST:
            with self.path.open("rb") as file:
                first: Any = json.loads(file.readline() or b"{}")
            self.place = first.get("coords", {}) if isinstance(first, dict) else {}
            self.at = size - _FIRST


class RunTail:
    """The last steps of a run, of all ranks whose files are here."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "events"
        self._ranks: dict[int, _RankTail] = {}

    def look(self) -> list[StepCalls]:
        """The latest steps that every rank has written down, in order. What cannot be read is left out."""
        for path in self._folder.glob("rank*.jsonl") if self._folder.is_dir() else ():
            if match := re.fullmatch(r"rank(\d+)\.jsonl", path.name):
                self._ranks.setdefault(int(match[1]), _RankTail(path))
        for rank, tail in self._ranks.items():
            try:
                tail.read(rank)
            except (OSError, ValueError):
                continue
        by_step: dict[int, dict[int, RankStep]] = {}
        for rank, tail in self._ranks.items():
            for step in tail.steps:
                by_step.setdefault(step.step, {})[rank] = step
        world = sum(bool(tail.steps) for tail in self._ranks.values())
        places = {rank: tail.place for rank, tail in self._ranks.items()}
        return [
            StepCalls(step, by_step[step], places) for step in sorted(by_step) if len(by_step[step]) == world
        ]

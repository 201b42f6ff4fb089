"""Tell the user once, while a run goes on, which rank holds the others up. No torch."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from unisono.report.stragglers import Straggler, stragglers
from unisono.report.tail import RunTail

EVERY = 3.0
"""Seconds between two looks; more where one takes long."""
_SPARE = 100.0  # times as long as a look takes, until the next one
_PATIENCE = 4  # looks until a straggler is told whose module nobody has seen
_LATELY = 8  # steps that may have gone well since, and it is still one


@dataclass
class LateRanks:
    """Looks at the ends of the ranks' files, in a thread beside. folder: of the run."""

    folder: Path
    _tail: RunTail | None = None
    _due: float = 0.0
    _seen: dict[tuple[int, str], int] = field(default_factory=dict)  # looks at which each was one
    _said: set[tuple[int, str]] = field(default_factory=set)
    _texts: list[str] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def news(self) -> list[str]:
        """What is to be said now, each once: of what was seen at the last look. Begins the next one if it is due."""
        now = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            return []
        texts, self._texts = self._texts, []
        if now >= self._due:
            self._due = now + EVERY
            self._thread = threading.Thread(target=self._look, name="unisono-late", daemon=True)
            self._thread.start()
        return texts

    def _look(self) -> None:
        begun = time.monotonic()
        try:
            self._tail = self._tail or RunTail(self.folder)
            steps = [step for step in self._tail.look() if step.step > 1]
            current = [each for each in stragglers(steps) if each.until_step + _LATELY >= steps[-1].step]
            self._texts = [text for each in current if (text := self._worded(each))]
        except Exception as error:  # a look is no reason to end a run
            self._texts = [f"late ranks are not looked for: {error!r}"]
            self._due = float("inf")
            return
        took = time.monotonic() - begun
        self._due = max(self._due, begun + _SPARE * took)

    def _worded(self, each: Straggler) -> str:
        """What is new of it. Waits a little for the module, which is seen in some steps alone."""
        key = each.rank, each.phase
        self._seen[key] = looks = self._seen.get(key, 0) + 1
        computes = each.phase in ("", "forward", "backward")
        if each.rotating or key in self._said or (computes and not each.module and looks < _PATIENCE):
            return ""
        self._said.add(key)
        return each.says()

"""Samples that come slowly: `benchmarks/verdicts.py` plants them. No torch."""

import os
import time
from dataclasses import replace
from typing import Any

from unisono.train.data.sources.stdlib import PythonLibrary

SLEEP = float(os.environ.get("PLANTED_SLEEP", "0.15"))


def dawdle(event: Any) -> None:
    """A callback that takes as long as the samples do."""
    if event.kind == "step":
        time.sleep(SLEEP)


class _Sleepy:
    """Samples that take a while to come; seldom: one batch in 12, for as much longer."""

    def __init__(self, inner: Any, seldom: bool) -> None:
        self._inner, self._seldom, self._count = inner, seldom, 0

    def __len__(self) -> int:
        return len(self._inner)

    def fetch(self, indices: Any) -> Any:
        self._count += 1
        if not self._seldom:
            time.sleep(SLEEP)
        elif self._count % 12 == 0:
            time.sleep(12 * SLEEP)
        return self._inner.fetch(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _with(corpus: Any, seldom: bool) -> Any:
    return replace(corpus, train=_Sleepy(corpus.train, seldom))


class SlowText(PythonLibrary):
    """The standard library's text, slowly."""

    name = "slow"

    def load(self, data: Any, model: Any) -> Any:
        return _with(super().load(data, model), False)


class HiccupText(PythonLibrary):
    """The standard library's text, which is slow now and then."""

    name = "hiccup"

    def load(self, data: Any, model: Any) -> Any:
        return _with(super().load(data, model), True)

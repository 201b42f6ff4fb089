"""What `unisono bench` measures, one bench a folder: flags and table, without torch; in `live`, what ranks do.

Whatever is compared runs in the same processes, call by call in turns that begin elsewhere each time, and a ratio is
the median over turns. So a busy machine is busy for all of them.
"""

import argparse
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unisono.report.picture import BarChart, LineChart
from unisono.spec.errors import UsageError
from unisono.spec.finder import Finder
from unisono_contrib.measure.slower import median_within

Row = dict[str, Any]
"""One line of a table and of --json. Each has at least one key ratio_vs_SOMETHING, null where that did not run."""


class Bench(ABC):
    """One of the things that can be measured. ranks: how many are started, where nobody started any and none were asked
    for. threads: of each of these; 0: its share of the cores. Those that somebody started (a lab, torchrun) all take
    part, with the threads that they have."""

    name: ClassVar[str]
    about: ClassVar[str]
    ranks: ClassVar[int] = 2
    threads: ClassVar[int] = 0

    def flags(self, parser: argparse._ArgumentGroup) -> None:
        """Adds its own flags."""
        return

    @abstractmethod
    def ask(self, args: argparse.Namespace, ranks: int) -> dict[str, Any]:
        """What ranks are asked for, as JSON values. Raises UsageError."""

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> list[str]:
        """For people."""

    @abstractmethod
    def charts(self, rows: Sequence[Row]) -> list[BarChart | LineChart]:
        """For --out."""

    @property
    def live(self) -> str:
        """The module whose `rows(ctx, place, asked)` every rank plays; what rank 0 returns counts."""
        return f"{type(self).__module__}.live"


BENCHES: Finder[Bench] = Finder(
    "bench", "unisono_contrib.measure.benches", Bench, "unisono bench", folders=True
)

_SIZE = re.compile(r"(\d+)(?:B|([KMG])(?:IB)?)?")


def sizes_of(text: str) -> list[int]:
    """`4KiB,1MiB` in bytes. Raises UsageError C02."""
    sizes = []
    for word in filter(None, text.split(",")):
        match = _SIZE.fullmatch(word.strip().upper())
        if match is None or not int(match[1]):
            raise UsageError(
                f"{word!r} is no size", where="--sizes", fix="--sizes 4KiB,1MiB,16MiB", code="C02"
            )
        sizes.append(int(match[1]) << 10 * " KMG".index(match[2] or " "))
    return sizes


def chosen(text: str | None, known: Sequence[str], flag: str) -> list[str]:
    """`a,b` among the known ones; all of them where nothing is said. Raises UsageError C02."""
    words = list(known) if text is None else [word for word in text.split(",") if word]
    for word in words:
        if word not in known:
            raise UsageError(
                f"{word!r} is not one of them", where=flag, fix=f"{flag} {','.join(known)}", code="C02"
            )
    return words


def compared(times: Mapping[str, Sequence[float]], way: str, peer: str) -> float | None:
    """How many times as fast one way is as another, the median over turns; None where either did not run."""
    if not times.get(way) or not times.get(peer):
        return None
    return statistics.median(b / a for a, b in zip(times[way], times[peer], strict=True))


def within(times: Mapping[str, Sequence[float]], way: str, peer: str) -> tuple[float, float] | None:
    """The interval in which the median of `compared` lies with a confidence of 90 % at least, by the order of the
    ratios alone (the sign test); of less than five turns the whole range. None where either did not run."""
    if not times.get(way) or not times.get(peer):
        return None
    return median_within([b / a for a, b in zip(times[way], times[peer], strict=True)])


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the interval that holds the middle nine tenths, in seconds."""
    ordered = sorted(seconds)
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.05, 0.95))
    return {"seconds": statistics.median(ordered), "seconds_p05": low, "seconds_p95": high}


def columns(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Words in columns, the first ones to the left, what begins with a digit to the right."""
    widths = [max(len(line[at]) for line in (head, *lines)) for at in range(len(head))]
    right = [all(line[at][:1] in "0123456789–" for line in lines) for at in range(len(head))]
    return [
        "  ".join(
            word.rjust(wide) if to_right else word.ljust(wide)
            for word, wide, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (head, *lines)
    ]


def times_as_fast(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}x"

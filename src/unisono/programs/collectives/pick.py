"""Which algorithm for which size: what has been measured as a value that a plan can carry.

`direct-65536/engine-262144/ring-1048576` takes `direct` up to 65,536 bytes, the engine up to 262,144, `ring` up to
1,048,576, and beyond that the engine.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from unisono.programs.collectives import Program
from unisono.programs.collectives.price import Topology, seconds

USUAL = "engine"
MARGIN = 0.15
"""By how much of its time another one must be quicker than the engine to be taken."""
_PICK = re.compile(r"([a-z][a-z_0-9]*)-([1-9][0-9]*)")


class Pick(NamedTuple):
    """An algorithm, and the largest vector, in bytes, for which it is taken."""

    name: str
    most: int


def read(text: str) -> tuple[Pick, ...]:
    """From a plan's words; "" is none. Raises ValueError."""
    picks = []
    for part in filter(None, text.split("/")):
        match = _PICK.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no algorithm and bytes, such as direct-65536")
        picks.append(Pick(match[1], int(match[2])))
    if [pick.most for pick in picks] != sorted({pick.most for pick in picks}):
        raise ValueError(f"{text!r}: sizes must rise")
    return tuple(picks)


def written(picks: Iterable[Pick]) -> str:
    """For a plan."""
    return "/".join(f"{pick.name}-{pick.most}" for pick in picks)


def of(picks: Iterable[Pick], nbytes: int) -> str:
    """The algorithm for a vector of so many bytes."""
    return next((pick.name for pick in picks if nbytes <= pick.most), USUAL)


def cheapest(programs: Mapping[str, Callable[[], Program]], nbytes: int, topology: Topology) -> str:
    """The program with the least price for a vector of so many bytes; of equals the first."""
    return min(programs, key=lambda name: seconds(programs[name](), nbytes, topology))


def picked(times: Mapping[int, Mapping[str, float]], margin: float = MARGIN) -> tuple[Pick, ...]:
    """The quickest for each size. times: of vectors of so many bytes, the seconds of the engine and of others. Another
    one is taken where it needs less than 1 - `margin` of the engine's time. A size stands for those down to the one
    before it; neighbours that agree are one; beyond the largest it is the engine."""
    picks: list[Pick] = []
    for nbytes, each in sorted(times.items()):
        best = min(each, key=lambda name: each[name])
        name = best if each[best] < (1.0 - margin) * each[USUAL] else USUAL
        if picks and picks[-1].name == name:
            picks.pop()
        picks.append(Pick(name, nbytes))
    while picks and picks[-1].name == USUAL:
        picks.pop()
    return tuple(picks)

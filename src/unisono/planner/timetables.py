"""Closed forms of the pipeline's timetables: what is held, and what is idle. The timetables themselves: `programs`.

Each form is that of the timetable as `programs` makes it, tests hold them together; the papers' own forms are the same
from enough micro-batches on. Sources: GPipe (Huang et al., 2019); 1F1B and interleaved (Narayanan et al., 2021);
looped_bfs (Lamy-Poirier, 2023); zb1p, zb2p, zbv (Qi et al., 2023); DualPipe (DeepSeek-V3 report, 2024); DualPipeV
(DeepSeek-AI and Sea AI Lab, 2025).

Numbers of micro-batches and seconds may be arrays.
"""

from functools import cache
from typing import Annotated

from unisono.plan.grammar import choice
from unisono.planner.machines.cluster import Source
from unisono.planner.numbers import larger, smaller

_BOTH_WAYS = Source(
    "specification", "each way has the whole model, DeepSeek-V3 report, 2024; DualPipeV folds it"
)
WEIGHT_COPIES: Annotated[dict[str, float], _BOTH_WAYS] = {"dualpipe": 2.0}
_BOTH_ENDS = ("zbv", "dualpipev")
HEAPED = ("gpipe", "looped_bfs")  # all forward passes come before the first backward one
# On the last row weight gradients wait here; the others that split a backward pass make the head's directly after it.
LATE = ("zb1p", "zb2p")


@cache
def chunks(schedule: str) -> int:
    """Stages that one rank owns of the pipeline that one micro-batch passes."""
    got = choice(schedule)
    if got.name in ("interleaved", "looped_bfs"):
        return int(got.options.get("v", "2"))
    return 2 if got.name in _BOTH_ENDS else 1


@cache
def name_of(schedule: str) -> str:
    """Without its options."""
    return choice(schedule).name


def ends(schedule: str, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows that have the stem, rows that have the head): the V-shaped ones have both on row 0, DualPipe twice each."""
    name = name_of(schedule)
    if name in _BOTH_ENDS:
        return (0,), (0,)
    if name == "dualpipe" and ranks > 1:
        return (0, ranks - 1), (0, ranks - 1)
    return (0,), (ranks - 1,)


def serves(schedule: str, ranks: int, micros: int, n_layer: int) -> bool:
    """Whether the timetable exists for these numbers: those that `programs` refuses have no price."""
    name = name_of(schedule)
    if ranks == 1:
        return name not in ("dualpipe", "dualpipev", "interleaved", "looped_bfs", "zb1p", "zb2p", "zbv")
    if ranks * chunks(schedule) > n_layer or name in ("accumulate", "pipedream"):
        return False
    if name == "interleaved":
        return micros % ranks == 0
    if name == "dualpipe":
        return ranks % 2 == 0 and micros % 2 == 0 and micros >= 2 * ranks
    return name != "dualpipev" or micros >= 2 * ranks


def in_flight(schedule: str, row: int, ranks: int, micros: float) -> float:
    """Micro-batches whose activations row `row` holds at its peak, each counted over all layers of the row.

    As `programs.pipeline.peak_held`, exactly; for zb2p and zbv at most, since their ranks do not always hold as many as
    they may. Where weight gradients come apart, activations are held until those are made.
    """
    name, v = name_of(schedule), chunks(schedule)
    if ranks == 1:
        return 1.0 if name != "gpipe" else float(micros)
    depth = float(ranks - row)
    if name in HEAPED:
        return micros * 1.0
    if name == "interleaved":
        # Warm-up of 2 (p-row-1) + (v-1) p chunks and the one being computed, each 1/v of a row.
        held = (2 * (depth - 1) + (v - 1) * ranks + 1) / v
    elif name in ("zb1p", "zbv"):
        held = float(ranks)
    elif name == "zb2p":
        held = 2.0 * ranks
    elif name == "dualpipe":
        held = ranks + 1.0
    elif name == "dualpipev":
        held = ranks + 0.5
    else:
        held = depth
    return smaller(held, micros * 1.0)


def idle(schedule: str, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
    """Seconds of a step in which a row waits, given seconds of one micro-batch on one row.

    backward includes weight, the part of it that nobody waits for. Overlapped pairs take as long as their parts. The
    zero-bubble ones are counted between a row's own first start and last stop (`programs.pricing.slowest`). Exact where
    weight is the least of the three parts and all rows cost the same; zbv also where a forward is no longer than the
    backward towards the input, and the DualPipes where all three parts are equal. Else no less than what is played; for
    the DualPipes with forwards no longer than the backward towards the input.
    """
    name, v, turns = name_of(schedule), chunks(schedule), ranks - 1
    if ranks == 1:
        return 0.0 * forward
    inner = backward - weight
    weight = smaller(weight, smaller(forward, inner))
    if name == "looped_bfs":
        # A loop is at least as long as the way round.
        return (turns + (v - 1) * larger(0, ranks - micros)) * (forward + backward) / v
    if name == "interleaved":
        return turns * (forward + backward) / v
    if name in ("zb1p", "zb2p"):
        owed = smaller(micros, ranks * (1 if name == "zb1p" else 2)) - 1
        return larger(0.0, turns * (forward + inner) - owed * weight)
    if name == "zbv":
        missing = smaller(larger(0, 2 * ranks - 1 - micros), turns) * weight
        return turns * (larger(forward, inner) - weight) + missing + larger(0, ranks - micros) * forward
    if name in ("dualpipe", "dualpipev"):
        loops = ranks / 2 - 1 if name == "dualpipe" else turns / v
        return loops * ((forward + backward) + backward - 3 * weight)
    return turns * (forward + backward)

"""Closed forms of the pipeline's timetables: what is held, and what is idle. The timetables themselves: `programs`.

Sources: GPipe (Huang et al., 2019); 1F1B and interleaved (Narayanan et al., 2021); zb1p, zb2p, zbv (Qi et al., 2023);
DualPipe (DeepSeek-V3 report, 2024).
"""

from typing import Annotated

from unisono.plan.grammar import choice
from unisono.spec.cluster import Source

_BOTH_WAYS = Source("specification", "DeepSeek-V3 report, 2024, table 2")
WEIGHT_COPIES: Annotated[dict[str, float], _BOTH_WAYS] = {"dualpipe": 2.0, "dualpipev": 2.0}


def chunks(schedule: str) -> int:
    """Stages that one rank owns."""
    got = choice(schedule)
    if got.name in ("interleaved", "looped_bfs"):
        return int(got.options.get("v", "2"))
    return 2 if got.name in ("zbv", "dualpipev") else 1


def in_flight(schedule: str, row: int, ranks: int, micros: int) -> float:
    """Micro-batches whose activations row `row` holds at its peak, each counted over all layers of the row.

    For gpipe, 1f1b and accumulate this is `programs.pipeline.peak_held`.
    """
    name, v = choice(schedule).name, chunks(schedule)
    if ranks == 1:
        return 1.0 if name != "gpipe" else float(micros)
    depth = float(ranks - row)
    if name in ("gpipe", "looped_bfs"):
        held = float(micros)
    elif name == "interleaved":
        # Warm-up of 2 (p-row-1) + (v-1) p chunks and the one being computed, each 1/v of a row.
        held = (2 * (depth - 1) + (v - 1) * ranks + 1) / v
    elif name == "zb2p":
        held = min(2.0 * depth - 1.0, 2.0 * ranks)
    elif name == "zbv":
        held = float(ranks)
    elif name in ("dualpipe", "dualpipev"):
        held = float(ranks + 1)
    else:
        held = depth
    return min(held, float(micros))


def idle(schedule: str, ranks: int, forward: float, backward: float, weight: float) -> float:
    """Seconds of a step in which a row waits, given seconds of one micro-batch on one row.

    backward includes weight, the part of it that nobody waits for.
    """
    name, v = choice(schedule).name, chunks(schedule)
    both = forward + backward
    if name in ("interleaved", "looped_bfs"):
        return (ranks - 1) * both / v
    if name == "zb1p":
        return (ranks - 1) * max(0.0, forward + backward - weight - weight)
    if name in ("zb2p", "zbv"):
        return 0.0
    if name in ("dualpipe", "dualpipev"):
        return max(0.0, ranks / 2 - 1) * max(0.0, both + (backward - weight) - 3 * weight)
    return (ranks - 1) * both

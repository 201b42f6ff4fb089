"""Lines of ranks that meet at the end of backward, made up: who is late, by how much, in what."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from unisono.report.calls import StepCalls, rank_step

MODULES = ("stem", *(f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "mlp")), "head")
PHASES = {"data": 0.004, "forward": 0.03, "backward": 0.06, "optim": 0.005, "other": 0.001}

Late = Callable[[int, int], tuple[float, str, str]]
"""(step, rank) → seconds that it is late in this step, in which part, in which module."""


def nobody(step: int, rank: int) -> tuple[float, str, str]:
    return 0.0, "", ""


def line(
    step: int, rank: int, own: Mapping[str, float], waits: float, calls: list[list[Any]], **more: Any
) -> dict[str, Any]:
    """As a rank writes it."""
    time = {**own, "comm_exposed": waits + 0.001, "comm_hidden": 0.0, "wait": 0.0}
    return {
        "kind": "step",
        "step": step,
        "rank": rank,
        "time": time,
        "start": 1e9 + step,
        "calls": calls,
        **more,
    }


def lines(
    late: Late,
    ranks: int = 4,
    steps: int = 60,
    noise: float = 0.1,
    timed: int = 4,
    buckets: int = 1,
    seed: int = 0,
) -> list[list[dict[str, Any]]]:
    """By step and rank. Modules are timed in each `timed`-th step; gradients leave in so many buckets."""
    luck, out = random.Random(seed), list[list[dict[str, Any]]]()
    for step in range(1, steps + 1):
        own = [{p: s * luck.uniform(1 - noise, 1 + noise) for p, s in PHASES.items()} for _ in range(ranks)]
        lag = [late(step, rank) for rank in range(ranks)]
        for mine, (seconds, phase, _) in zip(own, lag, strict=True):
            if phase:
                mine[phase] += seconds
        out.append(_step(step, own, lag, step % timed == 0 if timed else False, buckets))
    return out


def _step(
    step: int, own: list[dict[str, float]], lag: list[tuple[float, str, str]], timed: bool, buckets: int
) -> list[dict[str, Any]]:
    """Backward goes through the modules in reverse; a bucket leaves after each `len(MODULES) / buckets` of them. The
    optimiser's time of a step comes after its calls, so it is late for those of the next: here it is counted first."""
    arrivals, names = list[list[float]](), list[str]()
    for bucket in range(buckets):
        share = (bucket + 1) / buckets
        passed = MODULES[::-1][: round(share * len(MODULES))]
        names.append(passed[-1])
        row = []
        for mine, (seconds, phase, module) in zip(own, lag, strict=True):
            before = mine["optim"] + mine["data"] + mine["forward"] + mine["other"]
            is_past = phase != "backward" or not module or module in passed
            backward = mine["backward"] - (seconds if phase == "backward" else 0.0)
            row.append(before + share * backward + (seconds if phase == "backward" and is_past else 0.0))
        arrivals.append(row)
    done = [max(row) + 0.001 for row in arrivals]
    out = []
    for rank, mine in enumerate(own):
        calls = [
            [
                "dp",
                "all_reduce",
                1 << 20,
                "backward",
                names[b],
                arrivals[b][rank],
                done[b],
                arrivals[-1][rank],
                b,
            ]
            for b in range(buckets)
        ]
        seconds, phase, module = lag[rank]
        modules = {
            name: [
                0.003 + (seconds if (phase, module) == ("forward", name) else 0.0),
                0.006 + (seconds if (phase, module) == ("backward", name) else 0.0),
            ]
            for name in MODULES
        }
        waits = done[-1] - 0.001 - arrivals[-1][rank]
        out.append(line(step, rank, mine, waits, calls, **({"modules": modules} if timed else {})))
    return out


def steps(
    written: list[list[dict[str, Any]]], places: Mapping[int, Mapping[str, int]] | None = None
) -> list[StepCalls]:
    """As the reader gives them; ranks differ on `dp` if nobody says otherwise."""
    out = []
    for of_step in written:
        ranks = {rank: one for rank, said in enumerate(of_step) if (one := rank_step(rank, said)) is not None}
        out.append(StepCalls(of_step[0]["step"], ranks, places or {rank: {"dp": rank} for rank in ranks}))
    return out

"""What tables send: a recommender's rows, where `ep` deals them, and the sums of their sparse gradients.

What a pass sends follows from sizes. How many rows a step has read follows from the data: at most as many as its
samples look up, which is what is said here.
"""

from collections.abc import Iterator
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.source import Source
from unisono.planner.work.stage import Transfer
from unisono.spec.workload import Tables

_NUMBERS = Source("specification", "numbers of rows travel as 64-bit integers")
INDEX: Annotated[float, _NUMBERS] = 8.0


def apart(own: Tables, plan: Plan) -> bool:
    """Whether gradients of these tables travel by themselves, the rows that were read alone."""
    policy, schedule = member("sync", plan.sync), member("schedule", plan.schedule)
    return own.count > 0 and not getattr(policy, "leafwise", False) and getattr(schedule, "chains", 1) == 1


def passing(own: Tables, plan: Plan, samples: float, item: float, *, backward: bool) -> Iterator[Transfer]:
    """Of one pass over dealt tables, of so many samples of one rank. item: bytes of an element."""
    if plan.ep == 1:
        return
    n = plan.ep
    if not own.count:  # nobody has said how they are cut
        yield Transfer("ep", "all_to_all", own.given * samples * item)
        return
    width = own.given / own.count
    most = (
        -(-own.count // n) if own.cut == "table" else own.count
    )  # tables of one rank; what is short is filled up
    if not backward and own.cut == "table":
        yield Transfer("ep", "all_to_all", n * samples * most * own.indices / own.count * INDEX)
    elif not backward:
        yield Transfer("ep", "all_gather", n * samples * own.indices * INDEX)
    if own.cut == "row":
        way = "all_gather" if backward else "reduce_scatter"
        yield Transfer("ep", way, n * samples * own.given * item)
    else:
        part = width if own.cut == "table" else -(-width // n)
        yield Transfer("ep", "all_to_all", n * samples * most * part * item)


def together(own: Tables, plan: Plan, samples: float, item: float) -> Iterator[Transfer]:
    """Sums of sparse gradients after the passes of a step of so many samples of one rank: first of ranks of a replica
    that hold the same part, then of replicas. How many rows each has, which, and what is in them."""
    if not apart(own, plan):
        return
    share = plan.ep if own.cut == "column" else 1
    width, held = own.given / own.count / share, own.elements / plan.ep
    count = -(-own.count // plan.ep) if own.cut == "table" else own.count
    holders = plan.shard * plan.cp * plan.tp // plan.ep
    rows = min(
        held / width,
        samples * plan.ep * own.indices * count / own.count / (plan.ep if own.cut == "row" else 1),
    )
    for axis, ranks in (("holders", holders), ("dp", plan.dp)):
        if ranks > 1:
            for nbytes in (INDEX * count, INDEX * rows, item * rows * width):
                yield Transfer(axis, "all_gather", ranks * nbytes)
        rows = min(held / width, rows * ranks)

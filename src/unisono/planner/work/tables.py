"""What tables send where `ep` deals a recommender's rows: indices and rows of one pass."""

from collections.abc import Iterator
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.source import Source
from unisono.planner.work.stage import Transfer
from unisono.spec.workload import Tables

_NUMBERS = Source("specification", "numbers of rows travel as 64-bit integers")
INDEX: Annotated[float, _NUMBERS] = 8.0


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

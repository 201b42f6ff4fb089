"""Which algorithm sums gradients quickest between these hosts: priced by the links as they are measured, then played.

A price says what the links allow, not what the processors that play the messages do. So the cheapest program of each
size, and plain messages, are held beside the engine, in turns, and taken only where they were quicker. All ranks agree
on all numbers.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from unisono.comm.collectives import COLLECTIVES, Algorithm, ProgramCollective
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.messages import Messages
from unisono.comm.device import synchronize
from unisono.comm.hosts import nodes_of
from unisono.comm.rounds import ProgramAlgorithm
from unisono.programs.collectives import pick
from unisono.programs.collectives.pick import Pick
from unisono.programs.collectives.price import Topology, alike, seconds

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
BUDGET = 10.0  # seconds that it may take in all, roughly
_LARGE = 1 << 18  # bytes of the message that tells a rate
_TURNS = 3
_CPU = torch.device("cpu")
_ONE_HOST = ("hierarchical",)  # where each host has one rank it is what goes between the hosts


def probe(pg: dist.ProcessGroup, sizes: tuple[int, ...] = SIZES, budget: float = BUDGET) -> tuple[Pick, ...]:
    """What to take for which size. Every member of the group calls it, or it hangs. What would take longer than the
    budget is not measured: there it is the engine."""
    began, size = time.perf_counter(), pg.size()
    crowded = len(nodes_of(pg)) < size
    names = [name for name in COLLECTIVES.names() if name not in _ONE_HOST or crowded]
    played = {name: COLLECTIVES.read(name).bind(pg, "dp") for name in names if _is_program(name)}
    bound = {name: by for name, by in played.items() if isinstance(by, ProgramAlgorithm)}
    plain: dict[str, Algorithm] = {
        collective.name: collective.bind(pg, "dp") for collective in (Engine(), Messages())
    }
    links = links_of(pg)
    times: dict[int, dict[str, float]] = {}
    for nbytes in sizes:
        x = torch.zeros(nbytes // 4)
        programs = {name: partial(by.program, "all_reduce", x) for name, by in bound.items()}
        name = pick.cheapest(programs, nbytes, links)
        [spent] = agreed([time.perf_counter() - began], pg)
        if spent + 3 * (_TURNS + 1) * seconds(programs[name](), nbytes, links) > budget:
            break
        times[nbytes] = in_turns({**plain, name: bound[name]}, x, pg)
    return pick.picked(times)


def _is_program(name: str) -> bool:
    return issubclass(COLLECTIVES.find(name), ProgramCollective)


def links_of(pg: dist.ProcessGroup) -> Topology:
    """The way between two neighbours, the slowest of all, while all of them send: latency and rate."""
    small, large = torch.zeros(1), torch.zeros(_LARGE // 4)
    _to_the_next(small, pg)  # connections are made
    each = [timed(lambda x=x: _to_the_next(x, pg), pg) for x in (small, large) for _ in range(_TURNS)]
    took = agreed(each, pg)
    latency, whole = min(took[:_TURNS]), min(took[_TURNS:])
    return alike(latency, _LARGE / max(1e-9, whole - latency))


def in_turns(ways: dict[str, Algorithm], x: torch.Tensor, pg: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of a sum of x by each way, of the slowest member: the least of some turns, since others on the machine
    make a turn longer and none makes it shorter. The first turn touches memory and does not count."""
    took = [
        timed(lambda by=by: by.all_reduce(x, dist.ReduceOp.SUM).wait(), pg)
        for _ in range(_TURNS + 1)
        for by in ways.values()
    ]
    slowest = agreed(took, pg)[len(ways) :]
    return {name: min(slowest[i :: len(ways)]) for i, name in enumerate(ways)}


def agreed(numbers: list[float], pg: dist.ProcessGroup | None = None) -> list[float]:
    """The greatest that a member gives, one by one; of a process without a group its own."""
    if not dist.is_initialized():
        return numbers
    box = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=pg)
    return box.tolist()


def timed(
    call: Callable[[], object], pg: dist.ProcessGroup | None = None, device: torch.device = _CPU
) -> float:
    """Seconds of a call that all begin together, on this rank; a GPU is waited for."""
    if dist.is_initialized():
        dist.barrier(group=pg)
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun


def _to_the_next(x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    out, index, size = torch.empty_like(x), pg.rank(), pg.size()
    coming = pg.recv([out], (index - 1) % size, 0)
    going = pg.send([x], (index + 1) % size, 0)
    coming.wait()
    going.wait()

"""How much of a slow link the collectives fill: seconds that they take over one, beside their bytes over its rate.

    python benchmarks/wire.py                     two ranks, 1000 and 100 Mbit/s; needs root, ip and tc
    python benchmarks/wire.py --links 0           over loopback: seconds, no ratios

A ratio of 1.00 is a link that is full from the call to the result. Bytes are what one host sends, by the algorithm.
"Gloo's" are the process group's own all-reduce, all-gather and all-to-all, called in turn with ours. At the end of a
line: milliseconds of a core, of the whole machine, for a megabyte that any rank sends in an all-reduce.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lab
import psutil
import torch
import torch.distributed as dist

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh, Shape
from unisono.launch.context import RankContext
from unisono.launch.fork_server import ForkServer
from unisono.observe.span import Recorder
from unisono.train.build.build import connect, place_of

# Of 1,538 bytes of an Ethernet frame on a wire, IP and TCP with time stamps leave 1,448.
PAYLOAD = 1448 / 1538
OPS = ("all_reduce", "Gloo's", "message", "all_gather", "Gloo's gather", "exchange", "Gloo's exchange")
SIZES = [1 << shift for shift in (12, 16, 18, 20, 22)]


def main(ctx: RankContext | None = None, argument: Any = None, shared: object = None) -> Any:
    """Of the command, and of each rank of it."""
    if ctx is None:
        return command()
    if argument["hosts"]:
        lab.enter(argument["hosts"][ctx.rank * len(argument["hosts"]) // ctx.world])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store)
    group = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), place.timeout).dp
    return [
        [*medians(group, size, argument["times"]), core(group, size, argument["times"])] for size in SIZES
    ]


def medians(group: Group, size: int, times: int) -> list[float]:
    """Seconds of each of OPS on so many bytes, the median of calls in turns that all ranks begin together."""
    count = size // 4 // group.size * group.size
    whole, into, part = torch.zeros(count), torch.zeros(count), torch.zeros(count // group.size)

    def message() -> None:
        if group.index == 0:
            group.start_send(whole, 1).wait()
        elif group.index == 1:
            group.start_recv(whole, 0).wait()

    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(whole),
        lambda: dist.all_reduce(whole, group=group.pg),
        message,
        lambda: group.gather_into(whole, part),
        lambda: dist.all_gather_single(whole, part, group=group.pg),
        lambda: group.start_exchange(whole)[1].wait(),
        lambda: dist.all_to_all_single(into, whole, group=group.pg),
    ]
    took: list[list[float]] = [[] for _ in calls]
    for turn in range(times + 1):
        for call, each in zip(calls, took, strict=True):
            group.barrier()
            begun = time.perf_counter()
            call()
            if turn:
                each.append(time.perf_counter() - begun)
    return [statistics.median(each) for each in took]


def core(group: Group, size: int, times: int) -> float:
    """Seconds of a core, of all ranks together, for a byte that one of them sends in an all-reduce of so many bytes."""
    whole = torch.zeros(size // 4)
    count = min(100 * times, max(times, times * (1 << 21) // size))
    group.barrier()
    begun = busy()
    for _ in range(count):
        dist.all_reduce(whole, group=group.pg)
    group.barrier()
    return (busy() - begun) / (count * 2 * (group.size - 1) * size)


def busy() -> float:
    """Seconds that the machine's cores have worked so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def command() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--links", nargs="+", type=float, default=[1000.0, 100.0], metavar="MBIT")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--times", type=int, default=15, help="of each (default 15)")
    options = parser.parse_args()
    print(f"{'link':<12}{'ranks':>5}  {'bytes':>9}" + "".join(f"{op:>17}" for op in OPS) + f"{'core':>9}")
    with ForkServer("wire:main", path=[str(Path(__file__).parent)]) as nursery:
        for megabits in options.links:
            if megabits and not lab.possible():
                print(f"{megabits:.0f} Mbit/s: skipped, needs root and the tools ip and tc")
                continue
            for ranks in options.ranks:
                with lab.link(megabits) if megabits else nullcontext(()) as hosts:
                    given = {"hosts": list(hosts), "times": options.times}
                    outcome = nursery.run(given, ranks, 1, timeout=300.0, backend="gloo")
                if outcome.error is not None:
                    raise SystemExit(outcome.why())
                lines(megabits, ranks, [each for each in outcome.results if each is not None])
    return 0


def lines(megabits: float, ranks: int, found: list[Any]) -> None:
    """A line for each size: of every operation the rank that takes longest."""
    for size, *each in zip(SIZES, *found, strict=True):
        text = f"{f'{megabits:.0f} Mbit/s' if megabits else 'loopback':<12}{ranks:>5}  {size:>9,}"
        *slowest, cores = map(max, *each)
        for op, took in zip(OPS, slowest, strict=True):
            full = sent(op, ranks, size) / (megabits * 1e6 / 8 * PAYLOAD) if megabits else 0.0
            text += f"{f'{1e3 * took:.2f} ms' + (f', {took / full:.2f}' if full else ''):>17}"
        print(text + f"{1e9 * cores:>9.2f}", flush=True)


def sent(op: str, ranks: int, nbytes: float) -> float:
    """Bytes that leave a host, of two with half of the ranks each."""
    if op == "message":
        return nbytes
    if op.endswith("exchange"):
        return ranks / 2 * nbytes / 2  # each rank of this host sends a part to each of the other
    return (ranks - 1) / ranks * nbytes * (2 if op in OPS[:2] else 1)


if __name__ == "__main__":
    sys.exit(main())

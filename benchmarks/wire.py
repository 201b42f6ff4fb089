"""How much of a slow link the collectives fill: seconds that they take over one, beside their bytes over its rate.

    python benchmarks/wire.py                     two ranks, 1000 and 100 Mbit/s; needs root, ip and tc

A ratio of 1.00 is a link that is full from the call to the result. Bytes are what one host sends, by the algorithm.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import lab

from unisono.comm.mesh import Mesh, Shape
from unisono.launch.context import RankContext
from unisono.launch.nursery import Nursery
from unisono.measure import collectives
from unisono.observe.span import Recorder
from unisono.planner.host import PAYLOAD
from unisono.train.build import connect
from unisono.train.session import place_of

OPS = [op for op in collectives.OPS if op != "shared_sum"]  # two hosts share no memory
SIZES = [1 << shift for shift in (12, 14, 16, 17, 18, 19, 20, 21, 22)]


def main(ctx: RankContext | None = None, argument: Any = None, shared: object = None) -> Any:
    """Of the command, and of each rank of it."""
    if ctx is None:
        return command()
    lab.enter(argument["hosts"][ctx.rank * len(argument["hosts"]) // ctx.world])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store)
    mesh = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), place.timeout)
    return collectives.timed(mesh.dp, SIZES, place.device, argument["least"])


def command() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--links", nargs="+", type=float, default=[1000.0, 100.0], metavar="MBIT")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--least", type=float, default=1.0, help="seconds of each (default 1)")
    options = parser.parse_args()
    if not lab.possible():
        print("skipped: needs root and the tools ip and tc")
        return 0
    print(f"{'link':<12}{'ranks':>5}  {'bytes':>9}" + "".join(f"{op:>24}" for op in OPS))
    with Nursery("wire:main", path=[str(Path(__file__).parent)]) as nursery:
        for megabits in options.links:
            for ranks in options.ranks:
                with lab.link(megabits) as hosts:
                    given = {"hosts": list(hosts), "least": options.least}
                    outcome = nursery.run(given, ranks, 1, timeout=300.0, backend="gloo")
                if outcome.error is not None:
                    raise SystemExit(f"{outcome.error.render()}\n{outcome.trace}")
                lines(megabits, ranks, outcome.results[0])
    return 0


def lines(megabits: float, ranks: int, found: Any) -> None:
    rate = megabits * 1e6 / 8 * PAYLOAD
    for size in SIZES:
        text = f"{f'{megabits:.0f} Mbit/s':<12}{ranks:>5}  {size:>9,}"
        for op in OPS:
            took = next(seconds for one, nbytes, seconds in found if (one, nbytes) == (op, size))
            full = sent(op, ranks, size) / rate
            text += f"{f'{1e3 * took:.2f} ms, {took / full:.2f}':>24}"
        print(text, flush=True)


def sent(op: str, ranks: int, nbytes: float) -> float:
    """Bytes that leave a host, of two with half of the ranks each."""
    if op == "message":
        return nbytes
    if op == "reduce_scatter":
        return ranks / 2 * nbytes / 2  # an exchange: each rank of this host sends a part to each of the other
    return (ranks - 1) / ranks * nbytes * (2 if op == "all_reduce" else 1)


if __name__ == "__main__":
    sys.exit(main())

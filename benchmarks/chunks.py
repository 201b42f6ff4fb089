"""Steps of `tp=2` in chunks of positions, beside steps that gather all and then multiply, over a slow link.

    python benchmarks/chunks.py                        one rank a host, 1000 and 100 Mbit/s; needs root, ip and tc
    python benchmarks/chunks.py --links 0              over loopback
    python benchmarks/chunks.py --seconds 20           of each link

All ways live in the same processes, take the same samples and alternate step by step, in turns that begin elsewhere
each time. A ratio is the time of a step without chunks over that of one with them, the median over turns: above 1, the
chunks pay. `exposed` is the share of a step in which a rank does nothing but wait for tp.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lab

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.launch.fork_server import ForkServer
from unisono.observe.span import Recorder
from unisono.train.build.build import build, connect, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step

RANKS = 2
RECIPE = Recipe(
    name="bench-chunks",
    model=ModelConfig(n_layer=2, n_head=8, d_model=256, context=256),
    data=DataConfig(source="stdlib", tokenizer="byte"),
    train=TrainConfig(steps=100_000, global_batch=2, micro_batch=2, lr=1e-3, warmup_steps=100),
)


def main(ctx: RankContext | None = None, argument: Any = None, shared: object = None) -> Any:
    """Of the command, and of each rank of it."""
    if ctx is None:
        return command()
    if argument["hosts"]:
        lab.enter(argument["hosts"][ctx.rank])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store)
    return turns(ctx, place, argument)


def turns(ctx: RankContext, place: Any, argument: Any) -> Any:
    """[[seconds of a step, share of it that waits for tp] of each plan] of each turn, and all plans' last losses."""
    runs = []
    for plan in argument["plans"]:
        resolved = resolve(RECIPE, plan, ctx.world)
        corpus = load(resolved.recipe.data, resolved.recipe.model)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
        runs.append((run, feeds(resolved.recipe, resolved.plan, corpus, place.device)[0]))
    world, found, losses = runs[0][0].mesh.world, [], [0.0] * len(runs)
    begun = time.perf_counter()
    for turn in range(10_000):
        took = [[0.0, 0.0]] * len(runs)
        for shift in range(len(runs)):
            i = (turn + shift) % len(runs)
            run, feed = runs[i]
            leaves = feed.fetch(run.step, run.leaves)
            before, _ = run.recorder.totals().get("comm_exposed", 0.0), world.barrier()
            start = time.perf_counter()
            losses[i] = train_step(run, leaves).loss
            world.barrier()
            seconds = time.perf_counter() - start
            took[i] = [seconds, (run.recorder.totals()["comm_exposed"] - before) / seconds]
        found += [took] if turn else []
        # The first rank's clock decides.
        if bool(
            world.broadcast(_flag(place, time.perf_counter() - begun > argument["seconds"] and turn > 3))
        ):
            break
    for _, feed in runs:
        feed.close()
    return found, losses


def _flag(place: Any, over: bool) -> Any:
    import torch

    return torch.tensor([over], dtype=torch.uint8, device=place.device)


def command() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--links", nargs="+", type=float, default=[1000.0, 100.0], metavar="MBIT")
    parser.add_argument("--chunks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each link (default 15)")
    options = parser.parse_args()
    plans = [f"tp={RANKS}", *(f"tp={RANKS}:chunks={n}" for n in options.chunks)]
    print(f"{'link':<12} {'plan':<16} {'step, ms':>9} {'exposed':>8} {'ratio':>6} {'turns':>6}  loss off by")
    with ForkServer("chunks:main", path=[str(Path(__file__).parent)]) as nursery:
        for megabits in options.links:
            if megabits and not lab.possible():
                print(f"{megabits:.0f} Mbit/s: skipped, needs root and the tools ip and tc")
                continue
            with lab.link(megabits) if megabits else nullcontext(()) as hosts:
                given = {"hosts": list(hosts), "plans": plans, "seconds": options.seconds}
                outcome = nursery.run(given, RANKS, 1, timeout=300.0, backend="gloo")
            got: Any = outcome.results[0]
            if outcome.error is not None or got is None:
                raise SystemExit(outcome.error.render() if outcome.error else "stopped")
            lines(f"{megabits:.0f} Mbit/s" if megabits else "loopback", plans, *got)
    return 0


def lines(link: str, plans: list[str], turns: list[Any], losses: list[float]) -> None:
    """Of one link."""
    for i, plan in enumerate(plans):
        step = statistics.median(turn[i][0] for turn in turns)
        exposed = statistics.median(turn[i][1] for turn in turns)
        ratio = statistics.median(turn[0][0] / turn[i][0] for turn in turns)
        off = abs(losses[i] - losses[0]) / abs(losses[0])
        print(
            f"{link:<12} {plan:<16} {1e3 * step:>9.1f} {exposed:>8.0%} {ratio:>6.2f} {len(turns):>6}  {off:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

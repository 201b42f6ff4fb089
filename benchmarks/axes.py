"""Each axis and timetable beside PyTorch's own way of it, at equal work, on this machine's processors.

    python benchmarks/axes.py                     everything, about five minutes
    python benchmarks/axes.py --seconds 3         a quick look
    python benchmarks/axes.py --only tp=2 pp=2    plans that begin so

Each pair lives in the same processes and alternates in short blocks of steps; a round is A B B A, its ratio is that of
the two times. The figure is the median of the rounds' ratios with its 90 % interval, by the order of the rounds' ratios
alone. Above 1: ours is faster. Both compute the same model on the same samples; `losses` is how far they differ.

FSDP2, parallelize_module and torch.distributed.pipelining are raced where they run on Gloo. Context parallelism of
torch does not run on CPUs; zero=1 and cp are beside DDP too, which does the same work in another way. The last pair is
ours twice: stages of measured seconds beside stages of as many blocks, where blocks are unequal.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer

GOAL = 0.95
RANKS = 2
RECIPE = Recipe(
    name="bench-axes",
    model=ModelConfig(n_layer=8, n_head=4, d_model=128, context=64, tie_embeddings=False),
    data=DataConfig(source="stdlib", tokenizer="byte"),
    train=TrainConfig(steps=100_000, global_batch=16, micro_batch=2, lr=1e-3, warmup_steps=100, clip=1.0),
)
UNEVEN = RECIPE.model_copy(
    update={
        "model": ModelConfig(kind=f"{Path(__file__).parents[1]}/tests/parallel/uneven.py:uneven", context=64),
        "train": RECIPE.train.model_copy(update={"clip": 0}),
    }
)  # two of its eight blocks take as long as all others together, and their matrices do not tell
PAIRS = (  # (our plan, the peer beside it)
    ("shard=2 zero=1", "zero-1"),
    ("shard=2 zero=1", "ddp"),
    ("shard=2 zero=2", "fsdp-no-reshard"),
    ("shard=2 zero=3", "fsdp"),
    ("tp=2", "dtensor"),
    ("cp=2", "ddp"),
    ("pp=2 schedule=gpipe", "torch-gpipe"),
    ("pp=2 schedule=1f1b", "torch-1f1b"),
    ("pp=2 schedule=interleaved:v=2", "torch-interleaved"),
    ("pp=2 schedule=zb1p", "torch-zb"),
    ("pp=2 schedule=zbv", "torch-zb"),
    ("pp=2 schedule=pipedream:cut=measured", "even-cut"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=24.0, help="of racing, per pair (24)")
    parser.add_argument("--block", type=float, default=0.4, help="least seconds of one block (0.4)")
    parser.add_argument("--only", nargs="+", default=[""], help="plans that begin so")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    chosen = [(plan, peer) for plan, peer in PAIRS if plan.startswith(tuple(options.only))]
    load = os.getloadavg()[0]
    if not options.json:
        print(
            f"{len(os.sched_getaffinity(0))} cores, of which others use {load:.1f} (load before the first race)"
        )
        print(
            "ours                                  by torch            ratio  90 % interval   rounds"
            "  ms a step: theirs  ours   losses"
        )
    rows = []
    with ForkServer("race:main", path=[str(Path(__file__).parent)]) as nursery:
        for plan, peer in chosen:
            rows.append(raced(nursery, plan, peer, options))
            if not options.json:
                print(line_of(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"schema_version": 1, "goal": GOAL, "load": load, "rows": rows}))
    else:
        ratio = statistics.median(row["ratio"] for row in rows)
        print(f"median over all {ratio:.3f}; the goal is {GOAL}")
    return 0


def raced(nursery: ForkServer, plan: str, peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table, of two builds, of which each loop is made first once."""
    argument = {
        "recipe": (UNEVEN if peer == "even-cut" else RECIPE).model_dump_json(exclude_unset=True),
        "plan": plan, "peer": peer, "control": False,
        "seconds": options.seconds / 2, "block_seconds": options.block,
    }  # fmt: skip
    rounds, losses, names = [], [], {}
    for first in (True, False):
        threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
        outcome = nursery.run(argument | {"ours_first": first}, RANKS, threads, timeout=300.0, backend="gloo")
        result = outcome.results[0]
        if outcome.error is not None or result is None:
            raise SystemExit(outcome.error.render() if outcome.error else "stopped")
        rounds += result["rounds"]
        losses += result["losses"]
        names = {"peer": result["peer"]}
    ours, theirs = ([one[who][0] for one in rounds] for who in (0, 1))
    ratios = sorted(t / o for o, t in zip(ours, theirs, strict=True))
    # A stage's loss is a rank's: by hand only the last one has it, and its mean over ranks is half of ours.
    gaps = [min(abs(a - b), abs(a - RANKS * b)) / abs(a) for a, b in losses]
    return {
        "plan": plan, **names, "ratio": statistics.median(ratios), "interval": interval(ratios),
        "rounds": len(ratios), "theirs_ms": 1e3 * statistics.median(theirs), "ours_ms": 1e3 * statistics.median(ours),
        "losses": max(gaps),
    }  # fmt: skip


def interval(ordered: Sequence[float], share: float = 0.9) -> tuple[float, float]:
    """Of the median of the distribution that these were drawn from, whatever it is: order statistics between which it
    lies with at least this probability, or all there are."""
    n, below, k = len(ordered), 0.0, 0
    while k < n // 2 and 2 * (below + math.comb(n, k) / 2**n) <= 1 - share:
        below += math.comb(n, k) / 2**n
        k += 1
    k = max(0, k - 1)
    return ordered[k], ordered[n - 1 - k]


def line_of(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"{row['plan']:<37} {row['peer']:<19} {row['ratio']:>5.2f}  {f'{low:.2f} .. {high:.2f}':<14} {row['rounds']:>7}"
        f"  {row['theirs_ms']:>17.1f} {row['ours_ms']:>5.1f}   {row['losses']:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())

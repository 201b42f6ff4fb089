"""Tokens per second of ours beside loops written by hand with PyTorch, on this machine's processors.

    python benchmarks/step.py                       everything, about six minutes
    python benchmarks/step.py --seconds 5           a quick look
    python benchmarks/step.py --size small --peer ddp

Each pair lives in the same processes and alternates in short blocks of steps; a round is A B B A, its ratio is that
of the two times, and the figure is the median of the rounds' ratios. Above 1: ours is faster. Where a loop's tensors
come to lie is settled as it is built, and favours one or the other, so each pair is built several times,
with either loop first in turn.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer

GOAL = 0.98
SIZES = {
    "10M": Recipe(
        name="bench-10m",
        model=ModelConfig(n_layer=8, n_head=5, d_model=320, context=128),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(steps=100_000, global_batch=8, lr=3e-4, warmup_steps=100, clip=1.0),
    ),
    "small": Recipe(
        name="bench-small",
        model=ModelConfig(n_layer=4, n_head=4, d_model=128, context=64),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(
            steps=100_000, global_batch=12, lr=1e-3, warmup_steps=100, betas=(0.9, 0.99), clip=1.0
        ),
    ),
}
# (peer, our plan beside it, processes; the cores are shared out among them)
PAIRS = (
    ("plain", "dp=1", 1),
    ("ddp", "dp=2", 2),
    ("fsdp", "shard=2 zero=3", 2),
    ("fsdp-no-reshard", "shard=2 zero=2", 2),
)


def main() -> int:
    options = arguments()
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    if not options.json:
        print(
            f"{cores} cores; ours / by hand, median over rounds of A B B A [quarter of rounds below .. above]"
        )
        print(
            f"{'model':<6} {'by hand':<18} {'ours':<20} {'ratio':>6}  {'quartiles':<14} {'rounds':>6}", end=""
        )
        print(f" {'by hand':>9} {'ours':>9} tokens/s   losses differ by")
    with ForkServer("race:main", path=[str(Path(__file__).parent)]) as nursery:
        for size in options.size:
            for peer, plan, ranks in PAIRS:
                if peer in options.peer:
                    row = run_pair(nursery, size, peer, plan, ranks, max(1, cores // ranks), options)
                    (failed if "failed" in row else rows).append(row)
                    if not options.json:
                        print(line_of(row), flush=True)
    if not rows:
        return 1
    worst = min(rows, key=lambda row: row["ratio"])
    if options.json:
        print(json.dumps({"schema_version": 1, "cores": cores, "goal": GOAL, "rows": [*rows, *failed]}))
    else:
        print(f"least ratio {worst['ratio']:.3f} ({worst['model']}, {worst['ours']}); the goal is {GOAL}")
    return 0 if not failed and (worst["ratio"] >= GOAL or not options.strict) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    peers = [peer for peer, _, _ in PAIRS]
    parser.add_argument("--seconds", type=float, default=32.0, help="of racing, per pair (default 32)")
    parser.add_argument(
        "--builds", type=int, default=4, help="of each pair, which share the seconds (default 4)"
    )
    parser.add_argument("--block", type=float, default=0.5, help="least seconds of one block (default 0.5)")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES), help="models")
    parser.add_argument("--peer", nargs="+", choices=peers, default=peers, help="hand-written loops")
    parser.add_argument(
        "--control", action="store_true", help="race each peer against itself: what chance does"
    )
    parser.add_argument("--strict", action="store_true", help=f"exit 1 where a ratio is under {GOAL}")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser.parse_args()


def run_pair(
    nursery: ForkServer,
    size: str,
    peer: str,
    plan: str,
    ranks: int,
    threads: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One row of the table; of a pair that ended otherwise than well, why."""
    argument = {
        "recipe": SIZES[size].model_dump_json(exclude_unset=True),
        "plan": plan,
        "peer": peer,
        "control": options.control,
        "seconds": options.seconds / options.builds,
        "block_seconds": options.block,
    }
    results = []
    for build in range(options.builds):
        ours_first = {"ours_first": build % 2 == 0}
        outcome = nursery.run(argument | ours_first, ranks, threads, timeout=300.0, backend="gloo")
        result = outcome.results[0]
        if outcome.error is not None or result is None:
            return {"model": size, "peer": peer, "ours": plan, "failed": outcome.why()}
        results.append(result)
    together = results[0] | {key: [x for one in results for x in one[key]] for key in ("rounds", "losses")}
    return {"model": size, "ranks": ranks, "threads": threads, **figures(together)}


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Ratios and medians from what the ranks saw."""
    ours, peer = ([one[who][0] for one in result["rounds"]] for who in (0, 1))
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    busy = [theirs[1] / mine[1] for mine, theirs in result["rounds"]]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    differences = [abs(a - b) / abs(b) for a, b in result["losses"]]
    return {
        "ours": result["ours"],
        "peer": result["peer"],
        "ratio": statistics.median(ratios),
        "ratio_vs_peer": statistics.median(ratios),
        "quartiles": [low, high],
        "processor_ratio": statistics.median(busy),
        "rounds": len(ratios),
        "steps": len(differences),
        "peer_tokens_per_s": result["tokens"] / statistics.median(peer),
        "ours_tokens_per_s": result["tokens"] / statistics.median(ours),
        "loss_difference": max(differences),
    }


def line_of(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['model']:<6} {row['peer']:<18} {row['ours']:<20} failed:\n{row['failed']}"
    low, high = row["quartiles"]
    return (
        f"{row['model']:<6} {row['peer']:<18} {row['ours']:<20} {row['ratio']:>6.3f}  {f'{low:.3f} .. {high:.3f}':<14}"
        f" {row['processor_ratio']:>5.3f} {row['rounds']:>6} {row['peer_tokens_per_s']:>9,.0f}"
        f" {row['ours_tokens_per_s']:>9,.0f}            {row['loss_difference']:.0e}"
    )


if __name__ == "__main__":
    sys.exit(main())

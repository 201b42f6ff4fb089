"""Steps to one loss by optimisers of whole matrices, beside AdamW, over three seeds.

    python benchmarks/second_order.py --json second.json             about half an hour on one core
    python benchmarks/second_order.py --steps 120 --seeds 0          reduced

A byte-level GPT of 0.3 M parameters learns from batches of 16 windows, each optimiser at its best learning rate, which
is chosen on a seed that is not printed, by doubling and halving until a lower one and a higher one are worse. All have
the same steps, warm-up and cosine decay to a tenth. The loss that all have to reach is the highest with which AdamW
ends on one of the seeds. The order of the literature is Muon < Shampoo <= AdamW (speed runs of modded-nanogpt, 2026).
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from kept_runs import KeptRuns, OneProcess, WholeRun, loss_of, tuned

from unisono_contrib.measure.benches import columns

SEEDS, TUNING = (0, 1, 2), 10
LOOKS = 40
STARTS = {"adamw": 4e-3, "muon": 4e-3, "shampoo": 4e-3, "soap": 4e-3}


def steps_to(goal: float, run: Mapping[str, Any]) -> float:
    """Steps until the held-out loss is no higher, between two looks in proportion; infinite where it never is."""
    before = (0, float("inf"))
    for at, loss in run["points"]:
        if loss <= goal:
            share = (before[1] - goal) / (before[1] - loss) if before[0] else 1.0
            return before[0] + share * (at - before[0])
        before = (at, loss)
    return float("inf")


def runs_of(kept: KeptRuns, optimizer: str, steps: int, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """One run for each seed, at the optimiser's best learning rate."""
    nursery, every = OneProcess(), max(1, steps // LOOKS)

    def run(lr: float, seed: int) -> dict[str, Any]:
        wanted = WholeRun("dp=1", seed, steps, lr, "small", optimizer=optimizer, batch=16, every=every)
        return kept.play(nursery, wanted)

    best = tuned(lambda lr: loss_of(run(lr, TUNING)), STARTS[optimizer])
    return [run(best, seed) for seed in seeds]


def table(runs: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """What is printed: by optimiser its steps to AdamW's loss and last losses, then the order of the medians."""
    goal = max(map(loss_of, runs["adamw"]))
    rows, medians = list[tuple[str, ...]](), dict[str, float]()
    for name, ours in runs.items():
        needed = [steps_to(goal, run) for run in ours]
        medians[name] = statistics.median(needed)
        losses = " ".join(f"{loss_of(run):.4f}" for run in ours)
        shown = " ".join(f"{x:.0f}" for x in needed)
        seconds = statistics.median(run["seconds"] for run in ours)
        rows.append(
            (name, f"{ours[0]['run']['lr']:g}", shown, f"{medians[name]:.0f}", losses, f"{seconds:.0f}")
        )
    head = (
        "optimizer",
        "lr",
        f"steps to {goal:.4f} by seed",
        "median",
        "last held-out loss by seed",
        "seconds a run",
    )
    order = " < ".join(sorted(medians, key=medians.__getitem__))
    holds = medians["muon"] < medians["shampoo"] <= medians["adamw"]
    return [*columns(head, rows), f"order: {order}; muon < shampoo <= adamw {'holds' if holds else 'FAILED'}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--optimizers", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--json", metavar="FILE", help="runs; what is there already is not run again")
    options = parser.parse_args()
    kept = KeptRuns(options.json)
    names = dict.fromkeys(("adamw", "muon", "shampoo", *options.optimizers))
    print(
        "\n".join(table({name: runs_of(kept, name, options.steps, tuple(options.seeds)) for name in names}))
    )


if __name__ == "__main__":
    sys.exit(main())

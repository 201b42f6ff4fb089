"""What Adasum gains where replicas are many: loss after as many steps as one replica makes, beside the plain mean.

    python benchmarks/adasum.py --json adasum.json      three seeds, about 40 minutes on two cores
    python benchmarks/adasum.py --steps 60 --seeds 1    to try it

A file is gone on with where it was cut off. Runs are those of `kept_runs`, with replicas as threads of one process: a
GPT of 0.3 M parameters, two samples a step and replica. Every way is tuned over the same learning rates. A second
column keeps the rate that is best for one replica alone: what a user gets who adds replicas and changes nothing else.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence

from kept_runs import KeptRuns, OneProcess, WholeRun

from unisono_contrib.measure.benches import columns

SAMPLES = 2
"""Of a replica, in a step."""
REPLICAS = (4, 8)
RATES: Mapping[str, Sequence[float]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2),
}


def ways() -> dict[str, tuple[str, int]]:
    """By name: the plan, and how many samples a step has."""
    alone = {"one replica": ("dp=1", SAMPLES)}
    means = {f"mean of {n}": (f"dp={n}", SAMPLES * n) for n in REPLICAS}
    return alone | means | {f"Adasum of {n}": (f"dp={n} sync=adasum", SAMPLES * n) for n in REPLICAS}


def losses(kept: KeptRuns, optimizer: str, seeds: Sequence[int], steps: int) -> dict[str, dict[float, float]]:
    """By way and learning rate, the median loss over the seeds."""
    nursery, medians = OneProcess(), dict[str, dict[float, float]]()
    for name, (plan, batch) in ways().items():
        for rate in RATES[optimizer]:
            runs = [
                kept.play(nursery, WholeRun(plan, seed, steps, rate, "small", optimizer, batch))
                for seed in seeds
            ]
            medians.setdefault(name, {})[rate] = statistics.median(run["points"][-1][1] for run in runs)
    return medians


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file that keeps the runs")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=tuple(RATES), nargs="+", default=list(RATES))
    options = parser.parse_args(words)
    kept, rows = KeptRuns(options.json), []
    for optimizer in options.optimizer:
        medians = losses(kept, optimizer, range(options.seeds), options.steps)
        usual = min(medians["one replica"], key=medians["one replica"].__getitem__)
        for name, by_rate in medians.items():
            best = min(by_rate, key=by_rate.__getitem__)
            rows.append((optimizer, name, f"{best:g}", f"{by_rate[best]:.4f}", f"{by_rate[usual]:.4f}"))
    heads = ("optimizer", "way", "best lr", "loss", "loss at the lr of one replica")
    print("\n".join(columns(heads, rows)))


if __name__ == "__main__":
    main(sys.argv[1:])

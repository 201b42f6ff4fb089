"""Samples that a parameter server needs to the loss of lock-step, also when a server is killed on the way.

The recommender of `examples/clicks.toml` on two workers: `sync=every_step`; `sync=ssp:s=4,copies=2` on two servers with
3 % more samples; and the same with the process of one server killed in the middle of the run. Losses are validation
losses after the last step; beside them stands how many times the samples of lock-step a run needed to its loss, on a
straight line between validations.

python benchmarks/servers.py                   # some two minutes on two cores
python benchmarks/servers.py --seeds 5 --s 8
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "examples" / "clicks.toml"
MORE = 1.03


def validated(plan: str, seed: int, steps: int, more: Sequence[str] = ()) -> list[tuple[int, float]]:
    """(step, validation loss) of a run. Raises SystemExit with what it said, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable, "-m", "unisono", "train", str(RECIPE), "--json", "--quiet", "--plan", plan, "--seed",
            str(seed),
            "--train.steps", str(steps), "--train.eval_every", str(max(1, steps // 40)), "--train.eval_batches", "32",
            "--train.save_every", "0", "--out.dir", folder, "--out.report", "false", *more,
        ]  # fmt: skip
        got = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
        if got.returncode:
            raise SystemExit(f"{plan}: {got.stderr[-2000:]}")
        return [(int(step), float(loss)) for step, loss in json.loads(got.stdout)["val"]]


def needed(seen: Sequence[tuple[int, float]], loss: float) -> float:
    """Steps until `loss`, on a straight line between validations; infinite where it is never reached."""
    for (before, above), (after, below) in pairwise(seen):
        if below <= loss:
            return before + (after - before) * max(0.0, above - loss) / max(above - below, 1e-12)
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--s", type=int, default=4)
    flags = parser.parse_args()
    served = f"dp=2 sync=ssp:s={flags.s},copies=2"
    servers = ("--launch.servers", "2")
    kill = ("--chaos", f"kill:who=1:step={flags.steps // 2}")
    print("seed  lock-step  servers  samples to it  killed  samples to it")
    ratios: list[tuple[float, float]] = []
    for seed in range(flags.seeds):
        target = validated("dp=2", seed, flags.steps)[-1][1]
        runs = [
            validated(served, seed, round(MORE * flags.steps), [*servers, *beside]) for beside in ((), kill)
        ]
        calm, killed = (needed(run, target) / flags.steps for run in runs)
        ratios.append((calm, killed))
        said = "  ".join(
            f"{run[-1][1]:.4f}  {ratio:>13.3f}" for run, ratio in zip(runs, (calm, killed), strict=True)
        )
        print(f"{seed:>4}  {target:>9.4f}  {said}", flush=True)
    for name, column in zip(("servers", "one killed"), zip(*ratios, strict=True), strict=True):
        middle = statistics.median(column)
        word = "holds" if middle <= MORE else "failed"
        print(f"{name}: {middle:.3f} times the samples of lock-step (median), {MORE:.2f} asked: {word}")


if __name__ == "__main__":
    main()

"""Steps that successive halving takes to what random search finds, and what a sweep repeats that is killed half-way.

Handwritten digits, a perceptron; learning rate, weight decay and width are searched. Both methods draw the same values,
on as many workers. Random search is left alone. The sweep by successive halving (asha) is killed by SIGKILL once half
of its trials have a value, and started again.

steps: of all trials together. best: the best validation loss at the recipe's last step. repeated: pieces of training
that were made twice. The target holds where asha comes to as good a best (within 1 %) with half the steps or fewer, and
nothing is repeated; else there is a NO.

python benchmarks/sweep.py                    # some three minutes a seed on two cores
python benchmarks/sweep.py --trials 6 --steps 64 --eta 2      # reduced, a minute
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from unisono_contrib.measure.benches import columns
from unisono_contrib.sweep import journal

RECIPE = """\
name = "digits"
[model]
kind = "mlp"
hidden = [64]
[data]
source = "digits"
[train]
steps = {steps}
global_batch = 32
eval_batches = 8
[out]
report = false
"""
SWEEP = """\
[sweep]
recipe = "digits.toml"
trials = {trials}
workers = {workers}
seed = {seed}
eta = {eta}
method = "asha"
[sweep.space]
"train.lr" = {{low = 1e-5, high = 1.0, log = true}}
"train.weight_decay" = {{low = 1e-3, high = 1.0, log = true}}
"model.hidden" = [[32], [64], [128]]
"""


def started(folder: Path, method: str) -> "subprocess.Popen[bytes]":
    """A sweep as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "unisono",
        "sweep",
        "sweep.toml",
        "--method",
        method,
        "--json",
        "--quiet",
    ]
    return subprocess.Popen([*command, "--out", method], cwd=folder, stdout=subprocess.PIPE)


def finished(folder: Path, method: str) -> dict[str, Any]:
    """The object of a sweep that is left alone."""
    out, _ = started(folder, method).communicate()
    return json.loads(out)


def killed(folder: Path, method: str, trials: int) -> int:
    """Kill a sweep once so many trials have a value; how many pieces had ended."""
    process = started(folder, method)
    while len({line["trial"] for line in values(folder / method)}) < trials:
        if process.poll() is not None:
            raise RuntimeError("the sweep has ended before it could be killed")
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    return len(values(folder / method))


def values(folder: Path) -> list[dict[str, Any]]:
    """The pieces of a sweep that have ended."""
    return [line for line in journal.lines(folder) if line["event"] == "value"]


def repeated(folder: Path) -> int:
    """Pieces that ended twice, and steps of a run that are in its metrics twice."""
    pieces = Counter((line["trial"], line["step"]) for line in values(folder))
    steps = Counter(
        (str(file.parent), json.loads(line)["step"])
        for file in folder.glob("trial-*/*/metrics.jsonl")
        for line in file.read_text().splitlines()
    )
    return sum(count - 1 for count in (*pieces.values(), *steps.values()))


def compared(folder: Path, args: argparse.Namespace, seed: int) -> tuple[list[list[str]], bool]:
    """The lines of the table, and whether the target holds."""
    (folder / "digits.toml").write_text(RECIPE.format(steps=args.steps))
    said = SWEEP.format(trials=args.trials, workers=args.workers, seed=seed, eta=args.eta)
    (folder / "sweep.toml").write_text(said)
    plain = finished(folder, "random")
    at = killed(folder, "asha", args.trials // 2)
    halving = finished(folder, "asha")
    twice, fewer = repeated(folder / "asha"), plain["steps"] / halving["steps"]
    equal = halving["best"]["value"] <= 1.01 * plain["best"]["value"]
    rows = [
        [str(seed), "random", str(plain["steps"]), f"{plain['best']['value']:.4f}", "", "1.00x", ""],
        [str(seed), f"asha, killed after {at} pieces", str(halving["steps"]), f"{halving['best']['value']:.4f}",
         str(twice), f"{fewer:.2f}x fewer", "yes" if equal and fewer >= 2 and not twice else "NO"],
    ]  # fmt: skip
    return rows, equal and fewer >= 2 and not twice


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    rows, holds = list[list[str]](), True
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            more, held = compared(Path(folder), args, seed)
        rows, holds = [*rows, *more], holds and held
    for line in columns(["seed", "method", "steps", "best", "repeated", "steps to it", "target"], rows):
        print(line)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

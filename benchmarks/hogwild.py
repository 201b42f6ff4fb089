"""Seconds to the same validation loss: one process, and several that share one set of weights (`sync=hogwild`).

The recommender of `examples/clicks.toml` with larger tables, whose updates touch the rows that their samples read.
Every process has one thread. An update is of `--batch` samples, whoever makes it: so several processes make as many
updates together as one makes alone. Seconds are those of the steps, without the start and the validations. Processes
wait for each other in the step before a validation, so that the wait counts. Between two validations the loss counts as
a straight line. The target is the loss that one process has after `--at` of its run.

Runs take turns, in another order in each round; the ratio is that of the medians. `whole run` is the ratio of the
seconds of all updates. On a machine that does other work, look at the rounds one by one.

python benchmarks/hogwild.py                  # some four minutes on two cores
python benchmarks/hogwild.py --processes 4 --rounds 3
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

TABLES = "[50000,10000,2000,300]"


@dataclass(frozen=True)
class Curve:
    """Of one run: (seconds of its steps, validation loss) at each validation; the mean staleness of an update."""

    points: list[tuple[float, float]]
    staleness: float

    def loss_at(self, share: float) -> float:
        """The loss at the validation after this share of the run."""
        return self.points[round(share * len(self.points)) - 1][1]

    def seconds_to(self, loss: float) -> float:
        """Seconds to this loss; infinite where it is never reached."""
        if self.points[0][1] <= loss:
            return self.points[0][0]
        for (before, above), (after, below) in pairwise(self.points):
            if below <= loss:
                return before + (after - before) * (above - loss) / max(above - below, 1e-12)
        return float("inf")


def ran(processes: int, folder: Path, flags: argparse.Namespace) -> Curve:
    """Train with so many processes. Raises SystemExit with what the run said, where it fails."""
    steps = flags.updates // processes
    look = max(1, steps // flags.looks)
    keys: dict[str, Any] = {
        "model.kind": "dlrm", "model.tables": TABLES, "model.lookups": 2, "model.d_table": 16, "model.n_dense": 8,
        "model.bottom": "[64]", "model.top": "[64,32]", "data.source": f"clicks:samples={flags.samples}",
        "train.steps": steps, "train.global_batch": flags.batch * processes, "train.micro_batch": flags.batch,
        "train.optimizer": "adagrad", "train.lr": flags.lr, "train.warmup_steps": steps // 20,
        "train.lr_schedule": "constant", "train.weight_decay": 0.0,
        "train.eval_every": look, "train.eval_batches": 128 // processes, "train.save_every": 0,
        "launch.threads_per_rank": 1, "launch.replan": "false", "out.report": "false", "out.dir": folder,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        "--json",
        "--quiet",
        "--plan",
        f"dp={processes} sync=hogwild:meet={look}",
    ]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if got.returncode:
        raise SystemExit(f"{processes} processes: {got.stderr[-2000:]}")
    said = json.loads(got.stdout)
    lines = [json.loads(line) for line in (Path(said["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    seconds, points, stale = 0.0, [], [0.0]
    for line in lines:
        if "tokens_per_s" in line:
            seconds += line["tokens"] / line["tokens_per_s"]
            stale.append(line.get("staleness", 0.0))
        if "val_loss" in line:
            points.append((seconds, line["val_loss"]))
    return Curve(points, statistics.fmean(stale))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=5000, help="of all processes together")
    parser.add_argument("--batch", type=int, default=64, help="samples of an update")
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--looks", type=int, default=20, help="validations of a run")
    parser.add_argument("--at", type=float, default=0.9)
    flags = parser.parse_args()
    ones, manys = [], []
    print(" round    loss   one, s  more, s  ratio  whole run staleness  last losses")
    for number in range(flags.rounds):
        curves = {}
        for processes in (1, flags.processes)[:: 1 - 2 * (number % 2)]:
            with tempfile.TemporaryDirectory() as folder:
                curves[processes] = ran(processes, Path(folder), flags)
        one, many = curves[1], curves[flags.processes]
        target = one.loss_at(flags.at)
        ones.append(one.seconds_to(target))
        manys.append(many.seconds_to(target))
        ratio, whole = ones[-1] / manys[-1], one.points[-1][0] / many.points[-1][0]
        said = f"{ones[-1]:>8.2f} {manys[-1]:>8.2f} {ratio:>6.2f} {whole:>10.2f} {many.staleness:>9.2f}"
        said += f"  {one.loss_at(1.0):.4f} {many.loss_at(1.0):.4f}"
        print(f"{number + 1:>5} {target:>7.4f} {said}", flush=True)
    ratio = statistics.median(ones) / statistics.median(manys)
    print(f"medians: one process {statistics.median(ones):.2f} s, {flags.processes} {statistics.median(manys):.2f} s,"
          f" {ratio:.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()

"""Steps a second while one of several workers computes five times as long: lock-step, and what waits less for it.

Every worker stands for a device of its own, also where cores are fewer: a micro-batch sleeps `--leaf` seconds beside a
model that takes hardly any, on the slow worker `--times` as long (the fault `slow` of --chaos). With `--leaf 0` nothing
sleeps but the slow worker, for as many times what its micro-batches take: then workers share this machine's cores.

Policies take turns in rounds. Of each run the first steps are left out, in which leaves are assigned anew. Printed are
medians over the rounds; a ratio is that of one round's runs.

python benchmarks/stragglers.py                                  # about four minutes
python benchmarks/stragglers.py --sync every_step every_step:balance=5 quorum:k=3 ssp:s=4
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK_STEP = "every_step"
POLICIES = (LOCK_STEP, "every_step:balance=3", "canonical:balance=3")
FOREVER = 1_000_000  # seconds


@dataclass(frozen=True)
class Ran:
    """Of one run: steps a second after the first ones, the last loss, micro-batches of each worker at the end."""

    rate: float
    loss: float
    leaves: str


def script(ranks: int, leaf: float, times: float) -> str:
    """The faults of a run: the last rank is the slow one."""
    if not leaf:
        return f"slow:who={ranks - 1}:step=1:times={times}:seconds={FOREVER}"
    seconds = [leaf] * (ranks - 1) + [leaf * times]
    faults = (f"slow:who={i}:step=1:times=1:leaf={s:g}:seconds={FOREVER}" for i, s in enumerate(seconds))
    return " ".join(faults)


def ran(sync: str, folder: Path, flags: argparse.Namespace) -> Ran:
    """Train under a policy. Raises SystemExit with what the run said, where it fails."""
    keys: dict[str, Any] = {
        "train.steps": flags.steps, "train.global_batch": flags.micros * flags.ranks, "train.micro_batch": 1,
        "train.eval_every": 0, "train.save_every": 0, "model.n_layer": 1, "model.n_head": 2, "model.d_model": 32,
        "model.context": 16, "out.report": "false", "launch.replan": "false", "out.dir": folder,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        "--json",
        "--quiet",
        "--plan",
        f"dp={flags.ranks} sync={sync}",
    ]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command += ["--chaos", script(flags.ranks, flags.leaf, flags.times)]
    got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if got.returncode:
        raise SystemExit(f"sync={sync}: {got.stderr[-2000:]}")
    said = json.loads(got.stdout)
    lines = [json.loads(line) for line in (Path(said["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > flags.warm and line.get("tokens_per_s")]
    seconds = statistics.median(line["tokens"] / line["tokens_per_s"] for line in steps)
    leaves = steps[-1].get("leaves", [flags.micros] * flags.ranks)
    return Ran(1.0 / seconds, said["loss"], "/".join(map(str, leaves)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sync", nargs="+", default=list(POLICIES), help="policies; the first is what others are held to"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--micros", type=int, default=8, help="micro-batches of each worker, where all have as many"
    )
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--warm", type=int, default=18, help="steps that are left out")
    parser.add_argument(
        "--leaf", type=float, default=0.02, help="seconds that a micro-batch sleeps; 0: real computing"
    )
    parser.add_argument("--times", type=float, default=5.0, help="how many times as long on the slow worker")
    flags = parser.parse_args()
    rounds: list[dict[str, Ran]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(flags.rounds):
            order = flags.sync if number % 2 == 0 else flags.sync[::-1]
            rounds.append({sync: ran(sync, Path(folder), flags) for sync in order})
            print(f"round {number + 1} of {flags.rounds}", file=sys.stderr)
    first = flags.sync[0]
    print(
        f"{flags.ranks} workers, one {flags.times:g} times as slow, {flags.micros} micro-batches each at the start"
    )
    print(
        f"{'policy':28} {'steps/s':>8} {'least':>8} {'most':>8} {'times ' + first:>18}   loss     micro-batches"
    )
    for sync in flags.sync:
        rates = [each[sync].rate for each in rounds]
        ratio = statistics.median(each[sync].rate / each[first].rate for each in rounds)
        last = rounds[-1][sync]
        row = f"{sync:28} {statistics.median(rates):8.2f} {min(rates):8.2f} {max(rates):8.2f} {ratio:18.2f}"
        print(f"{row}   {last.loss:.4f}   {last.leaves}")


if __name__ == "__main__":
    main()

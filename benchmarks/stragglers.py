"""Steps a second while one of several workers computes five times as long: lock-step, and what waits less for it.

Every worker stands for a device of its own, also where cores are fewer: a micro-batch sleeps `--leaf` seconds beside a
model that takes hardly any, on the slow worker `--times` as long (the fault `slow` of --chaos). With `--leaf 0` nothing
sleeps but the slow worker, for as many times what its micro-batches take: then workers share this machine's cores.
The last worker is slow for good; with `--turn 1` each is for one of its steps, then the next one.

Policies take turns in rounds. Of each run the first steps are left out, in which leaves are assigned anew. Printed are
medians over the rounds of steps over the seconds that all of them took; a ratio is that of one round's runs. `one
device` is the loss of a run with one worker, which nothing slows.

python benchmarks/stragglers.py                                                       # about four minutes
python benchmarks/stragglers.py --sync every_step every_step:balance=3 quorum:k=3     # one is slow for good
python benchmarks/stragglers.py --sync every_step ssp:s=8 quorum:k=3 --turn 1 --steps 66
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
ONE_DEVICE = "one device"
FOREVER = 1_000_000  # seconds


@dataclass(frozen=True)
class Ran:
    """Of one run: steps a second after the first ones, the last loss, micro-batches of each worker at the end."""

    rate: float
    loss: float
    leaves: str


def script(ranks: int, leaf: float, times: float, steps: int, turn: int) -> str:
    """The faults of a run: the last rank is the slow one, or each in turn for `turn` of its steps."""
    if not leaf:
        return f"slow:who={ranks - 1}:step=1:times={times}:seconds={FOREVER}"
    told = lambda who, step, leaf: f"slow:who={who}:step={step}:times=1:leaf={leaf:g}:seconds={FOREVER}"
    if not turn:
        return " ".join(told(i, 1, leaf * (times if i == ranks - 1 else 1.0)) for i in range(ranks))
    faults = []
    for who in range(ranks):
        is_slow = [(step - 1) // turn % ranks == who for step in range(1, steps + 1)]
        for step, now in enumerate(is_slow, 1):
            if step == 1 or now != is_slow[step - 2]:
                faults.append(told(who, step, leaf * (times if now else 1.0)))
    return " ".join(faults)


def ran(sync: str, folder: Path, flags: argparse.Namespace) -> Ran:
    """Train under a policy, or on ONE_DEVICE. Raises SystemExit with what the run said, where it fails."""
    alone = sync == ONE_DEVICE
    keys: dict[str, Any] = {
        "train.steps": flags.steps, "train.global_batch": flags.micros * flags.ranks, "train.micro_batch": 1,
        "train.eval_every": 0, "train.save_every": 0, "model.n_layer": 1, "model.n_head": 2, "model.d_model": 32,
        "model.context": 16, "out.report": "false", "launch.replan": "false", "out.dir": folder,
        "launch.threads_per_rank": 1,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        "--json",
        "--quiet",
        "--plan",
        f"dp=1 micros={flags.micros * flags.ranks}" if alone else f"dp={flags.ranks} sync={sync}",
    ]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    if not alone:
        command += ["--chaos", script(flags.ranks, flags.leaf, flags.times, flags.steps, flags.turn)]
    got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if got.returncode:
        raise SystemExit(f"sync={sync}: {got.stderr[-2000:]}")
    said = json.loads(got.stdout)
    lines = [json.loads(line) for line in (Path(said["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > flags.warm and line.get("tokens_per_s")]
    seconds = sum(line["tokens"] / line["tokens_per_s"] for line in steps) / (flags.steps - flags.warm)
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
    parser.add_argument(
        "--turn",
        type=int,
        default=0,
        help="steps for which each worker in turn is slow; 0: the last one, for good",
    )
    flags = parser.parse_args()
    rounds: list[dict[str, Ran]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(flags.rounds):
            order = flags.sync if number % 2 == 0 else flags.sync[::-1]
            rounds.append({sync: ran(sync, Path(folder), flags) for sync in order})
            print(f"round {number + 1} of {flags.rounds}", file=sys.stderr)
        alone = ran(ONE_DEVICE, Path(folder), flags)
    first = flags.sync[0]
    slow = f"each in turn for {flags.turn} of its steps" if flags.turn else "the last one for good"
    print(
        f"{flags.ranks} workers, {slow} {flags.times:g} times as slow, {flags.micros} micro-batches each at the start"
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
    print(f"{ONE_DEVICE:73} {alone.loss:.4f}")


if __name__ == "__main__":
    main()

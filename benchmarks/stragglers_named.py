"""A straggler inside backward, which the all-reduce hides: who names its rank, its part of the step, its module?

In each try one of four ranks, drawn by a seed, takes `--seconds` longer in the backward of one module, drawn too, from
a step on (the fault `lag` of --chaos). Counted is a try in which the running command has named all three on standard
error within `--within` seconds of the first such step. Beside it TraceML watches plain DistributedDataParallel with a
straggler of the same rank, module and length, and its verdict is printed as it says it. Its package has a venv of its
own: python -m venv T && T/bin/pip install torch==2.13.0 traceml-ai==0.5.0

python benchmarks/stragglers_named.py --traceml T/bin/traceml           # twenty tries: about ten minutes
python benchmarks/stragglers_named.py --tries 3 --seed 7                # without TraceML
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RANKS = 4
MODULES = [
    "stem",
    *(f"blocks.{i}.{part}" for i in range(4) for part in ("norm1", "attn", "norm2", "mlp")),
    "head",
]
FIRST = 10  # the step from which on the rank is late
STEPS = 100_000
OF_TRACEML = 60  # steps
_SAID = re.compile(r"rank (\d+) is late in (\w+), in ([\w.]+), since step (\d+): .*")


@dataclass(frozen=True)
class Named:
    """What the run said of its straggler, and seconds since the first late step; "" where it said nothing in time."""

    text: str
    seconds: float

    def is_right(self, who: int, module: str) -> bool:
        said = _SAID.search(self.text)
        return said is not None and (int(said[1]), said[2], said[3]) == (who, "backward", module)


def ours(who: int, module: str, folder: Path, flags: argparse.Namespace) -> Named:
    """Train until the straggler is named, or its time is over. Raises SystemExit where the run fails."""
    keys = {
        "train.steps": STEPS, "train.global_batch": 8, "train.micro_batch": 2, "train.eval_every": 0,
        "train.save_every": 0, "model.n_layer": 4, "model.n_head": 4, "model.d_model": 128, "model.context": 64,
        "out.report": "false", "out.dir": folder, "launch.threads_per_rank": 1, "launch.replan": "false",
    }  # fmt: skip
    lag = f"lag:who={who}:step={FIRST}:part=backward:module={module}:leaf={flags.seconds}"
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        "--no-color",
        "--plan",
        f"dp={RANKS}",
        "--chaos",
        lag,
    ]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    text, since = "", 0.0
    try:
        for line in run.stderr or ():
            lines.append(line)
            since = since or _injected(folder)
            if "is late" in line:
                text = line.strip()
            if text or (since and time.monotonic() - since > flags.within):
                break
            if len(lines) > 1000:
                break
    finally:
        seconds = time.monotonic() - since
        run.terminate()
        try:
            run.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
    if not since:
        raise SystemExit("".join(lines)[-2000:])
    return Named(text if seconds <= flags.within else "", seconds)


def _injected(folder: Path) -> float:
    """When the fault began, in seconds of the host's steady clock; 0 before."""
    for path in folder.glob("*/*/chaos.jsonl"):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            if said["event"] == "injected":
                return said["t"]
    return 0.0


def of_traceml(who: int, module: str, folder: Path, flags: argparse.Namespace) -> str:
    """TraceML's verdict on the same straggler, in its own words."""
    script = Path(__file__).with_name("stragglers_named_rank.py")
    command = [
        flags.traceml,
        "run",
        script,
        "--nproc-per-node",
        RANKS,
        "--logs-dir",
        folder,
        "--run-name",
        "try",
    ]
    command += ["--args", "--who", who, "--module", module, "--seconds", flags.seconds, "--steps", OF_TRACEML]
    words = list(map(str, command))
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    path = folder / "try" / "final_summary.txt"
    if not path.is_file():
        return f"no summary (exit {ran.returncode}): {(ran.stderr or ran.stdout).strip()[-300:]}"
    said = [line.strip("| \n") for line in path.read_text().splitlines()]
    wanted = ("Verdict:", "Why:", "Next:", "Step Time", "├─ Compute", "│  ├─ Forward", "│  ├─ Backward")
    return "; ".join(re.split(r"\s+\|\|", line)[0] for line in said if line.startswith(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="by which the rank is late in each step")
    parser.add_argument("--within", type=float, default=20.0, help="seconds in which it has to be named")
    parser.add_argument("--traceml", default="", help="its command, in a venv of its own")
    flags = parser.parse_args()
    drawn, right = random.Random(flags.seed), 0
    times: list[float] = []
    for number in range(1, flags.tries + 1):
        who, module = drawn.randrange(RANKS), drawn.choice(MODULES)
        with tempfile.TemporaryDirectory() as folder:
            named = ours(who, module, Path(folder, "ours"), flags)
            good = named.is_right(who, module)
            right += good
            times += [named.seconds] if good else []
            print(f"try {number}: rank {who} is {flags.seconds * 1e3:.0f} ms late in backward, in {module}")
            print(f"  unisono, after {named.seconds:4.1f} s: {named.text or 'nothing in time'}"
                  f"   {'right' if good else 'WRONG'}")  # fmt: skip
            if flags.traceml:
                print(f"  TraceML: {of_traceml(who, module, Path(folder, 'theirs'), flags)}", flush=True)
    seconds = f", after {min(times):.1f} to {max(times):.1f} s" if times else ""
    print(f"rank, part and module named by unisono in {right} of {flags.tries} tries{seconds}")


if __name__ == "__main__":
    main()

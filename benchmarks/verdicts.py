"""Is the verdict right, and is its promise kept? Bottlenecks are planted into short real runs, one each.

The verdict of `unisono ask` is read, the change that it proposes is made, and the run is repeated. Where the change is
no key (a loop in Python, a slow rank), it is made by hand, as the table says. Promised and gained are shares of the
time of a sample: of the median step with what lies between steps, without what the rank waited for a core, since other
programs take that. Healthy runs must have no verdict of trouble, and ambiguous ones must be answered with `cannot
tell`.

The thin and the long link are those of `unisono lab`, which needs root. Swap is played by a file that memory does not
keep: each step reads its pages from the disk again.

python benchmarks/verdicts.py                        # about 7 minutes on two quiet cores
python benchmarks/verdicts.py --only "slow loader"   # one, in a minute
python benchmarks/verdicts.py --only healthy
python benchmarks/verdicts.py --held-out             # cases drawn by a seed, on which no rule was chosen
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verdict_cases import CHOSEN, SEED, Planted, held_out

COMMON = (
    "--train.eval_every 0 --train.save_every 0 --out.report false --launch.threads_per_rank 1 --launch.replan false "
    "--train.global_batch 16 --train.steps 30"
)
LAB = "lab --hosts 2 --rate {rate} --delay {delay} -- unisono"


@dataclass(frozen=True)
class Answered:
    """A run and its verdict. sample_s: seconds of a sample: of the median step and what follows it."""

    verdict: Mapping[str, Any]
    sample_s: float
    run_dir: Path


def run(plant: Planted, flags: str, folder: Path) -> Answered:
    """Train, and ask. Raises SystemExit with what the run said, where it fails."""
    lab = shlex.split(LAB.format(rate=plant.lab[0], delay=plant.lab[1])) if plant.lab else []
    out = Path(tempfile.mkdtemp(dir=folder))
    program = (
        shutil.which("unisono", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        or "unisono"
    )
    lab = [program if word == "unisono" else word for word in lab]
    words = [
        "train",
        *shlex.split(COMMON),
        *shlex.split(flags),
        "--out.dir",
        str(out),
        "--name",
        "planted",
        "--quiet",
    ]
    environ = {**os.environ, "PLANTED_FOLDER": str(out), **plant.environ}
    got = subprocess.run(
        [program, *lab, *words], capture_output=True, text=True, check=False, timeout=400, env=environ
    )
    if got.returncode:
        raise SystemExit(f"{plant.name}: {shlex.join(words)}\n{got.stderr[-2500:]}")
    run_dir = next(path.parent for path in out.rglob("metrics.jsonl"))
    if plant.without is not None:
        (run_dir / "events" / f"rank{plant.without}.jsonl").unlink()
    answer = subprocess.run(
        [program, "ask", str(run_dir), "--json"], capture_output=True, text=True, check=True
    )
    return Answered(json.loads(answer.stdout), sample_seconds(run_dir), run_dir)


def sample_seconds(run_dir: Path) -> float:
    """By one rank's lines: the median step, without what it waited for a core, and the mean of the rest."""
    lines = [
        json.loads(line) for line in min((run_dir / "events").glob("rank*.jsonl")).read_text().splitlines()
    ]
    steps = [line for line in lines if line.get("kind") == "step"][4:]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tokens = metrics[-1]["tokens"]
    walls = [
        sum(s for part, s in line["time"].items() if part != "comm_hidden") - line.get("queue_s", 0.0)
        for line in steps
    ]
    between = statistics.fmean(line.get("between_s", 0.0) for line in steps) if steps else 0.0
    return (statistics.median(walls) + between) / tokens if walls else 0.0


def repaired(plant: Planted, before: Answered) -> tuple[str, str]:
    """(the flags of the repeated run, "" where nobody knows a change; what was changed)."""
    change = str(before.verdict["change"])
    if change and not plant.by_hand:
        return f"{plant.flags} {change}", change
    return plant.repaired, f"by hand: {plant.by_hand}"


def row(plant: Planted, folder: Path, repeat: bool) -> dict[str, Any]:
    """One plant: its verdict, and what came of the change."""
    begun, before = time.monotonic(), run(plant, plant.flags, folder)
    verdict = before.verdict
    right = verdict["cause"] in plant.causes and (plant.rank is None or verdict["rank"] == plant.rank)
    result = {
        "planted": plant.name, "verdict": verdict["cause"], "right": right, "sure": verdict["sure"],
        "share": verdict["share"], "sentence": verdict["sentence"], "others": verdict["others"],
        "promised": verdict["gain_s"] / verdict["step_s"] if verdict["step_s"] else 0.0,
    }  # fmt: skip
    flags, change = repaired(plant, before)
    if repeat and right and flags:
        after = run(plant, flags, folder)
        result |= {"change": change, "gained": 1.0 - after.sample_s / before.sample_s}
        result["kept"] = result["gained"] >= 0.5 * result["promised"]
    return result | {"seconds": time.monotonic() - begun}


def said(result: Mapping[str, Any]) -> str:
    """A row of the table."""
    text = f"{result['planted']:30} {result['verdict']:24} {'yes' if result['right'] else 'NO':5}"
    if "gained" in result:
        text += f" {result['promised']:8.0%} {result['gained']:7.0%} {'yes' if result['kept'] else 'NO':4}"
        text += f"  {result['change']}"
    elif not result["right"]:
        text += f"  {result['sentence'][:150]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="plants whose name holds this")
    parser.add_argument(
        "--held-out", metavar="SEED", type=int, nargs="?", const=SEED, help=f"cases drawn by a seed ({SEED})"
    )
    parser.add_argument("--no-repeat", action="store_true", help="read verdicts alone")
    parser.add_argument("--json", action="store_true", help="a line of JSON a plant, too")
    flags = parser.parse_args()
    cases = CHOSEN if flags.held_out is None else held_out(flags.held_out)
    groups = {"planted": cases.planted, "healthy": cases.healthy, "ambiguous": cases.ambiguous}
    head = f"{'planted':30} {'verdict':24} {'right':5} {'promised':>8} {'gained':>7} {'kept':4}  change"
    print(head, flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for group, plants in groups.items():
            for plant in plants:
                if flags.only in plant.name:
                    result = row(plant, Path(folder), group == "planted" and not flags.no_repeat)
                    results.setdefault(group, []).append(result)
                    print(said(result), flush=True)
                    if flags.json:
                        print(json.dumps(result), flush=True)
    for group, each in results.items():
        kept = [result for result in each if "kept" in result]
        promise = f", promise kept in {sum(r['kept'] for r in kept)} of {len(kept)}" if kept else ""
        print(f"{group}: right in {sum(r['right'] for r in each)} of {len(each)}{promise}")


if __name__ == "__main__":
    main()

"""Time to a loss over a slow link, with real computation: DDP fp32 beside a codec, in whole runs.

    python benchmarks/end_to_end.py                           four hosts at 100 Mbit/s, about 11 minutes
    python benchmarks/end_to_end.py --json end_to_end.json    the same, kept; cut off, it goes on where it was
    python benchmarks/end_to_end.py --whole int4+ef@1.5 --beside int8 --steps 60

Hosts are those of `unisono lab`, one rank each. A byte-level GPT of 3 M learns the standard library's sources: the same
model, first weights, order of samples, optimiser (AdamW), clipping and cosine decay on both sides. DDP makes `--steps`
steps. A codec named CODEC@F makes F times as many, in a decay of its own as long as that: a step costs so little that
more of them are worth it. The goal is the held-out loss that DDP has after its last step.

time to it: seconds of steps until the first look at the held-out loss that is no higher; looks are outside the clock.
sooner: DDP's time over that; `yes` if at least three times. device: bytes that left a host until then. Those of
`--beside` make 30 steps, for the seconds that one takes. Held-out loss in nats a byte, of the same windows for all.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.launch.fork_server import ForkServer
from unisono.spec import words
from unisono.spec.errors import Skipped
from unisono_contrib.lab.links import LabLink, rate_of
from unisono_contrib.lab.network import LabNetwork, require
from unisono_contrib.measure.benches import columns

DDP = "DDP fp32"
WHOLE = ("int4+ef@1.2", "powersgd:r=4+ef@1.6")
BESIDE = ("plain", "cast:bf16", "int8", "topk:ratio=0.01,kind=chunked+ef", "torch fp16 hook")
SOONER, SHORT, SKIPPED = 3.0, 30, 5  # SKIPPED: first steps that are not timed, in which connections are made
MODEL = ModelConfig(n_layer=4, n_head=4, d_model=256, context=64)


def recipe_of(steps: int, hosts: int) -> Recipe:
    """One sample a host and step: computation is small beside what the link takes."""
    return Recipe(
        name="end-to-end", seed=0, model=MODEL, data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(
            steps=steps, global_batch=hosts, micro_batch=1, lr=1e-3, min_lr=1e-4, lr_schedule="cosine",
            warmup_steps=max(1, steps // 20), eval_batches=64 // hosts,
        ),
    )  # fmt: skip


def main() -> int:
    options = arguments()
    try:
        require(LabLink(options.rate))
    except Skipped as error:
        print(error.render(), file=sys.stderr)
        return error.exit
    kept = Path(options.json) if options.json else None
    runs: list[dict[str, Any]] = json.loads(kept.read_text())["runs"] if kept and kept.exists() else []
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    begun = time.perf_counter()
    link = LabLink(options.rate)
    with (
        ForkServer("whole_runs:main", path=[str(Path(__file__).parent)]) as nursery,
        LabNetwork(options.hosts, link) as network,
    ):
        for way, steps, made in asked(options):
            if any((run["way"], run["planned"], run["steps"]) == (way, steps, made) for run in runs):
                continue
            runs.append(played(nursery, network.doors, way, steps, made))
            one = runs[-1]
            print(
                f"{way:<34} {one['steps']} steps, {words.seconds(statistics.median(one['took'][SKIPPED:]))} each, "
                f"held-out loss {one['points'][-1][1]:.4f}",
                flush=True,
            )
            keep(kept, runs)
    rows = rows_of(runs)
    print(f"\n{link.says()}, {options.hosts} hosts")
    for line in lines_of(rows):
        print(line)
    keep(kept, runs)
    best = max((row["sooner"] for row in rows if row["way"] != DDP and row["sooner"]), default=None)
    met = best is not None and best >= SOONER
    told = f"{best:.2f} times sooner" if best else "nothing reached the loss of DDP"
    print(f"\nbest: {told}, at least {SOONER:g} asked: {'yes' if met else 'NO'}")
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes, load {os.getloadavg()[0]:.1f}")
    return 1 if options.strict and not met else 0


def asked(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(way, steps of its schedule, steps that are made) of each run."""
    found = [(DDP, options.steps, options.steps)]
    for text in options.whole:
        codec, _, factor = text.partition("@")
        steps = round(options.steps * float(factor or 1.0))
        found.append((codec, steps, steps))
    short = min(SHORT, options.steps)
    return [*found, *((way, options.steps, short) for way in options.beside)]


def played(nursery: ForkServer, doors: Sequence[str], way: str, planned: int, made: int) -> dict[str, Any]:
    """One run. points: [steps, held-out loss]."""
    codec = "plain" if way == DDP or way.startswith("torch ") else way
    told = {
        "recipe": recipe_of(planned, len(doors)).model_dump_json(exclude_unset=True),
        "plan": f"dp={len(doors)} codec={codec}", "way": way, "steps": made, "doors": list(doors),
        "every": max(1, planned // 20) if planned == made else 0,
    }  # fmt: skip
    outcome = nursery.run(told, len(doors), 1, timeout=600.0, backend="gloo")
    if outcome.error is not None or outcome.results[0] is None:
        raise SystemExit(outcome.why())
    got: Any = outcome.results[0]
    return {"way": way, "planned": planned, "steps": made, "whole": planned == made, **got}


def keep(kept: Path | None, runs: Sequence[Mapping[str, Any]]) -> None:
    if kept is not None:
        beside = kept.with_name(kept.name + ".part")
        told = {"schema_version": 1, "rows": rows_of(runs), "runs": list(runs)}
        beside.write_text(json.dumps(told, indent=1) + "\n")
        beside.replace(kept)


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each run; those of whole ones say when they were at DDP's last loss."""
    peers = [run for run in runs if run["way"] == DDP and run["whole"]]
    if not peers:
        return []
    goal, whole = peers[0]["points"][-1][1], sum(peers[0]["took"])
    return [row_of(run, goal, whole) for run in runs]


def row_of(run: Mapping[str, Any], goal: float, theirs: float) -> dict[str, Any]:
    """goal: the loss that DDP has at its last step. theirs: its seconds until then."""
    clock = [0.0, *accumulate(run["took"])]
    at = next((step for step, loss in run["points"] if loss <= goal), None) if run["whole"] else None
    reached = None if at is None else clock[at]
    each = {
        key: run[key] / run["steps"] if run[key] is not None else None
        for key in ("device_bytes", "payload_bytes")
    }
    return {
        "way": run["way"], "steps": run["steps"], "whole": run["whole"], "load": run["load"],
        "step_s": statistics.median(run["took"][SKIPPED:] or run["took"]),
        "loss": run["points"][-1][1] if run["whole"] else None, "goal": goal, "steps_to_it": at,
        "seconds_to_it": reached,
        "sooner": theirs / reached if reached else None,
        "device_bytes_to_it": None if at is None else each["device_bytes"] * at,
        "device_bytes_step": each["device_bytes"], "payload_bytes_step": each["payload_bytes"],
    }  # fmt: skip


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "way", "steps", "a step", "of DDP", "last loss", "steps to it", "time to it", "sooner", "device to it",
        "device a step", "payload a step",
    )  # fmt: skip
    first = rows[0]["step_s"] if rows else 1.0
    return columns(head, [_line(row, first) for row in rows])


def _line(row: Mapping[str, Any], first: float) -> tuple[str, ...]:
    def size(value: float | None) -> str:
        return "–" if value is None else f"{value / 1e6:.3f} MB"

    sooner = "–"
    if row["whole"] and row["way"] != DDP:
        sooner = "never NO" if row["sooner"] is None else f"{row['sooner']:.2f}"
        sooner += "" if row["sooner"] is None else " yes" if row["sooner"] >= SOONER else " NO"
    return (
        row["way"], str(row["steps"]), words.seconds(row["step_s"]), f"{row['step_s'] / first:.3f}",
        "–" if row["loss"] is None else f"{row['loss']:.4f}", str(row["steps_to_it"] or "–"),
        "–" if row["seconds_to_it"] is None else words.seconds(row["seconds_to_it"]), sooner,
        size(row["device_bytes_to_it"]), size(row["device_bytes_step"]), size(row["payload_bytes_step"]),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rate", type=rate_of, default=100e6, metavar="R", help="of each link: 100mbit, 1gbit"
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="of DDP's run (150)")
    parser.add_argument("--whole", nargs="*", default=list(WHOLE), metavar="CODEC@F", help="run to the end")
    parser.add_argument(
        "--beside", nargs="*", default=list(BESIDE), metavar="WAY", help=f"{SHORT} steps each"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="runs and rows; what is there already is not run again"
    )
    parser.add_argument("--strict", action="store_true", help="leave with 1 where the target is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Time and bytes to one loss over a slow link, of every policy: from lock-step to free-running, in one table.

    python benchmarks/spectrum.py --json spectrum.json             four hosts at 100 Mbit/s, about an hour
    python benchmarks/spectrum.py --only ssp async --json some.json   some rows, by words in their plans

The goal is the held-out loss that DDP fp32 has after its last step. Each row is a run of its own, whose cosine is as
long as it is, with the steps padded to a multiple of h. Steps to the goal are seen off the lab, on four replicas of a
byte-level GPT of 0.3 M parameters, on threads: the first look, every 60 steps, at which the loss of the run's
weights (the outer ones, the mean, the servers') is no higher. Seconds and bytes of a step are those of a GPT of 3 M in
the lab, one rank a host: of 30 steps, or of 15 where each sends. The time to the goal is their product. Runs of
`--whole` are played in the lab with the larger model, half as long, to the loss that DDP has there.

bytes: of the host that sends most, with heads of frames and barriers. counted: what its rank counts. torchft's rows
need it installed: see benchmarks/torchft_diloco.py.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kept_runs import KeptRuns, OneProcess, WholeRun
from torchft_diloco import MISSING, TORCHFT, is_there

from unisono.launch.fork_server import ForkServer
from unisono.spec import words
from unisono.spec.errors import Skipped
from unisono_contrib.lab.links import LabLink, rate_of
from unisono_contrib.lab.network import LabNetwork, require
from unisono_contrib.measure.benches import columns

DDP, HOSTS, H, SEED = "DDP fp32", 4, 30, 0
LOCK_STEP, LOCAL = 1e-3, 1e-3
"""Learning rates of the small model, each the best of some on another seed."""
OF_LARGER = {"small": 1.0, "3M": 0.5}
STEPS, LAB_STEPS = 240, 120
"""Of DDP: off the lab, and in a whole run in the lab."""
LOSES_NOTHING = ("every_step", "period")
LOOK = 60
SOONER, FEWER = 8.0, 100.0
OUTER = {"h": H, "outer_lr": 0.7, "outer_momentum": 0.5}


@dataclass(frozen=True, slots=True)
class Row:
    """A way to train. sync, codec: of the plan. factor: times as many steps as DDP makes. h: steps of a round.
    warmup: steps of lock-step before rounds begin. settings: for torchft."""

    sync: str = "every_step"
    codec: str = "plain"
    factor: float = 1.0
    lr: float = LOCK_STEP
    h: int = 1
    optimizer: str = "adamw"
    servers: int = 0
    warmup: int = 0
    way: str = "ours"
    settings: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        codec = "" if self.codec == "plain" else f" codec={self.codec}"
        inside = "" if self.optimizer == "adamw" else f", {self.optimizer} inside"
        return self.way if self.way != "ours" else f"sync={self.sync}{codec}{inside}"

    def run(self, size: str = "small") -> WholeRun:
        """Off the lab, what loses nothing is played by one device, which computes the same. In the lab, with the larger
        model."""
        steps = -(-round((STEPS if size == "small" else LAB_STEPS) * self.factor) // H) * H
        plan = f"dp={HOSTS} sync={self.sync}" + ("" if self.codec == "plain" else f" codec={self.codec}")
        if (
            size == "small"
            and self.codec == "plain"
            and self.sync.startswith(LOSES_NOTHING)
            and self.way == "ours"
        ):
            plan = f"dp=1 micros={HOSTS} sync={self.sync}"
        return WholeRun(
            plan,
            SEED,
            steps,
            self.lr,
            optimizer=self.optimizer,
            way=self.way,
            every=LOOK,
            servers=self.servers,
        )


LONG = {"h": H, "lr": LOCAL, "factor": 2}
DILOCO = "diloco:h=30,outer_lr=0.7,outer_momentum=0.5"
SPARSE = "diloco:h=30,outer_lr=3,outer_momentum=0"
ROWS = (
    Row(way=DDP),
    Row(),
    Row(codec="cast:bf16", factor=1.125),
    Row(codec="int8", factor=1.125),
    Row(codec="int4+ef", factor=1.125),
    Row(codec="powersgd:r=4+ef", factor=1.25),
    Row(codec="topk:ratio=0.01,kind=chunked+ef", factor=2),
    Row("period:steps=4", factor=2),
    Row("lag", factor=1.125),
    Row("delayed:lag=1", factor=1.125),
    Row("local_sgd:h=30", **LONG),
    Row("local_sgd:h=30", "int4+ef", **LONG),
    Row("local_sgd:h=30,warmup=60", warmup=60, **LONG),
    Row("slowmo:h=30", **LONG),
    Row("adaptive:h=30,every=60", **LONG),
    Row(DILOCO, **LONG),
    Row(DILOCO, "int8", **LONG),
    Row(DILOCO, "int4+ef", **LONG),
    Row(f"{DILOCO},fragments=4,delay=2", **LONG),
    Row(SPARSE, "chunktopk+ef:beta=0.95", **{**LONG, "factor": 4}),
    Row(DILOCO, "ternary:clip=1+ef", optimizer="muon", **LONG),
    Row("gossip:ring", factor=1.125),
    Row("gossip:one_peer", factor=1.125),
    Row("gossip:pairs", factor=1.125),
    Row("gossip:one_peer,h=30,report=120", **LONG),
    Row("gossip:ring,gamma=0.3", "topk:ratio=0.1", factor=1.25),
    Row("noloco:h=30,outer_lr=0.7,outer_momentum=0.5", **{**LONG, "factor": 3}),
    Row("ssp:s=4", factor=1.125, servers=HOSTS),
    Row("async:rate=aware", factor=1.25, servers=HOSTS),
    Row("quorum:k=3", factor=1.125, servers=HOSTS),
    Row(way=f"{TORCHFT} DiLoCo", settings=OUTER, **LONG),
    Row(way=f"{TORCHFT} DiLoCo, buckets of 1 MiB", settings={**OUTER, "bucket_mb": 1}, **LONG),
)
WHOLE = (
    DDP,
    f"sync={DILOCO} codec=int4+ef",
    f"sync={DILOCO}",
    f"{TORCHFT} DiLoCo",
    f"{TORCHFT} DiLoCo, buckets of 1 MiB",
    "sync=async:rate=aware",
)


def main() -> int:
    options = arguments()
    link = LabLink(options.rate)
    try:
        require(link)
    except Skipped as error:
        print(error.render(), file=sys.stderr)
        return error.exit
    kept, begun = KeptRuns(options.json), time.perf_counter()
    chosen = [
        row for row in ROWS if row.way == DDP or not options.only or any(w in row.name for w in options.only)
    ]
    missing = {row.name: MISSING for row in chosen if row.way.startswith(TORCHFT) and not is_there()}
    with ForkServer("whole_runs:main", path=[str(Path(__file__).parent)]) as nursery:
        for row in sorted(chosen, key=lambda row: row.way != DDP and row.h == 1):
            if row.name not in missing and not options.lab_alone:
                run = kept.play(nursery if row.way != "ours" else OneProcess(), row.run(), **peer(row))
                missing |= {row.name: run["refused"]} if "refused" in run else {}
        there = [row for row in chosen if row.name not in missing]
        if not options.off_lab:
            with LabNetwork(HOSTS, link) as network:
                for row in (row for row in there if not row.warmup and not options.whole_alone):
                    kept.play(nursery, short(row, options.rate), network.doors, **peer(row))
                for name in options.whole:
                    for row in (row for row in there if row.name == name):
                        kept.play(nursery, whole(row, options.rate), network.doors, **peer(row))
    if kept.known(ROWS[0].run()) is None:
        return 0
    goal = last_loss(kept.known(ROWS[0].run()))
    rows = [figures_of(row, kept, goal, options.rate) for row in there]
    print(f"{link.says()}, {HOSTS} hosts; goal {goal:.4f}, of DDP fp32 after {STEPS} steps")
    print("\n".join(lines_of(rows)))
    for name, why in missing.items():
        print(f"{name}: {why}")
    judge(rows)
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes, load {os.getloadavg()[0]:.1f}")
    return 0


def peer(row: Row) -> dict[str, Any]:
    return {"torchft": dict(row.settings)} if row.settings else {}


def short(row: Row, rate: float) -> WholeRun:
    """Steps in the lab, after the first ones, in which connections are made: a round of 30, or 15 where all send."""
    before, timed = (row.h, row.h) if row.h > 1 else (3, 15)
    return replace(row.run("3M"), steps=LAB_STEPS, until=before + timed, every=before, lab=f"{rate:g}")


def whole(row: Row, rate: float) -> WholeRun:
    """The row's run in the lab."""
    return replace(row.run("3M"), every=H, lab=f"{rate:g}, whole")


def last_loss(run: Mapping[str, Any] | None) -> float:
    if run is None:
        raise SystemExit("there is no run of DDP fp32 to compare with")
    return run["points"][-1][1]


def to_goal(run: Mapping[str, Any] | None, goal: float) -> int | None:
    """Steps until the first look at which the loss is no higher."""
    return next((at for at, loss in run["points"] if loss <= goal), None) if run else None


def figures_of(row: Row, kept: KeptRuns, goal: float, rate: float) -> dict[str, Any]:
    """What is known of a row."""
    run, timed = kept.known(row.run()), kept.known(short(row, rate))
    full, base = kept.known(whole(row, rate)), kept.known(whole(ROWS[0], rate))
    at = to_goal(run, goal)
    said: dict[str, Any] = {
        "name": row.name, "steps": run and run["points"][-1][0], "loss": last_loss(run), "at": at,
        "distance": run and run["distance"], "step_s": None, "bytes": None, "counted": None, "whole_s": None,
        "whole_bytes": None, "step_s_to_it": None, "bytes_to_it": None, "counted_to_it": None,
    }  # fmt: skip
    for key, each in _of_a_step(timed).items():
        said[key], said[f"{key}_to_it"] = each, each * at if each and at else None
    if row.warmup and at and (dense := _of_a_step(kept.known(short(Row(), rate)))):
        rounds = _of_a_step(kept.known(short(Row(f"local_sgd:h={row.h}", **LONG), rate)))
        for key, each in rounds.items():  # its own first steps are those of lock-step
            said[key] = (row.warmup * dense[key] + (at - row.warmup) * each) / at
            said[f"{key}_to_it"] = said[key] * at
    if full is not None and base is not None and (there := to_goal(full, last_loss(base))):
        look = [steps for steps, _ in full["points"]].index(there)
        said["whole_s"] = full["clock"][look]
        said["whole_bytes"] = full["device_bytes"] * there / full["points"][-1][0]
    return said


def _of_a_step(timed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Seconds, and bytes that left a host and that its rank counted, of a mean step of a short run in the lab."""
    if timed is None:
        return {}
    last, first = timed["points"][-1][0], timed["points"][0][0]
    return {
        "step_s": (timed["clock"][-1] - timed["clock"][0]) / (last - first), "bytes": timed["device_bytes"] / last,
        "counted": timed["payload_bytes"] and timed["payload_bytes"] / last,
    }  # fmt: skip


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "way", "steps", "last loss", "to the goal", "a step", "time to it", "sooner", "bytes to it", "fewer",
        "counted to it", "whole run in the lab", "its bytes", "replicas differ by",
    )  # fmt: skip
    return columns(head, [_line(row, rows[0]) for row in rows])


def _line(row: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, ...]:
    def size(value: float | None) -> str:
        return "–" if value is None else f"{value / 1e6:.1f} MB"

    def times(key: str) -> str:
        return "–" if not row[key] or not base[key] else f"{base[key] / row[key]:.1f}"

    seconds = lambda value: "–" if value is None else words.seconds(value)
    return (
        row["name"], str(row["steps"]), f"{row['loss']:.4f}", str(row["at"] or "never"), seconds(row["step_s"]),
        seconds(row["step_s_to_it"]), times("step_s_to_it"), size(row["bytes_to_it"]), times("bytes_to_it"),
        size(row["counted_to_it"]), seconds(row["whole_s"]), size(row["whole_bytes"]), f"{row['distance']:.1e}",
    )  # fmt: skip


def judge(rows: Sequence[Mapping[str, Any]]) -> None:
    """What is asked of the table."""
    base = rows[0]
    reached = [row for row in rows[1:] if row["step_s_to_it"] and row["bytes_to_it"]]
    if not base["step_s_to_it"] or not reached:
        return
    both = [
        (base["step_s_to_it"] / row["step_s_to_it"], base["bytes_to_it"] / row["bytes_to_it"], row)
        for row in reached
    ]
    sooner, fewer, best = max(both, key=lambda each: (min(each[0] / SOONER, each[1] / FEWER, 1.0), each[0]))
    met = sooner >= SOONER and fewer >= FEWER
    print(
        f"best: {best['name']}, {sooner:.1f} times sooner with {fewer:.0f} times fewer bytes; at least {SOONER:g} and "
        f"{FEWER:g} asked: {'yes' if met else 'NO'}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rate", type=rate_of, default=100e6, metavar="R", help="of each link: 100mbit, 1gbit"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="rows with one of these in their names"
    )
    parser.add_argument(
        "--whole", nargs="*", default=list(WHOLE), metavar="ROW", help="played in the lab to the goal"
    )
    parser.add_argument("--off-lab", action="store_true", help="losses alone")
    parser.add_argument("--lab-alone", action="store_true", help="what is played in the lab alone")
    parser.add_argument("--whole-alone", action="store_true", help="whole runs in the lab alone")
    parser.add_argument("--json", metavar="FILE", help="runs; what is there already is not run again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The link of a parameter server as bottleneck: predicted by the planner, and measured in the lab, beside all-reduce.

One rank a host, on four hosts of `unisono lab` (so it needs root). Of each plan: bytes that the first rank sends in a
step, which carries a server if there is one, as the planner predicts and as the run's ledger counts them; bytes that
its host's link carries out and in, with heads of frames; and seconds of communication in a step, as predicted and
measured. Under a policy with servers that is all time in which the first rank waits for servers or sends to them.
Weights that are gathered at the end, and the set-up, are in a shorter run as well, which is subtracted.

    python benchmarks/server_link.py                     # some five minutes on two cores
    python benchmarks/server_link.py --rate 1gbit --hosts 2 --servers 1 2
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from unisono_contrib.lab.links import rate_of

UNISONO = (sys.executable, "-m", "unisono")
SHORT, LONG = 4, 12
"""Steps of the run that is subtracted, and of the other one."""
CLUSTER = """
name = "lab"
device = "cpu"
node = {hosts}
nodes = 1
stack = "plain-cpu"
[[link]]
name = "lab"
size = 0
bandwidth_gb_s = {{ value = {bandwidth}, origin = "specification", source = "unisono lab --rate" }}
latency_us = {{ value = 200.0, origin = "specification", source = "a guess: it is small beside the bytes" }}
"""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Of the first rank's host. sent, received: bytes of its link in the whole run. counted: bytes of the ledger in the
    median step; talk: seconds of communication in it."""

    sent: int
    received: int
    counted: float
    talk: float


def run(words: Sequence[str]) -> dict[str, Any]:
    """The object that a command prints. Raises SystemExit with what it said, where it fails."""
    got = subprocess.run([*UNISONO, *words], capture_output=True, text=True, check=False, timeout=500)
    if got.returncode:
        raise SystemExit(f"{' '.join(words)}: {got.stderr[-2000:]}")
    return json.loads(got.stdout)


def measured(plan: Sequence[str], hosts: int, rate: str, steps: int) -> MeasuredRun:
    """Train the demo in the lab for so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        train = [
            *UNISONO, "train", "--demo", "--quiet", *plan, "--train.steps", str(steps), "--train.eval_every", "0",
            "--train.save_every", "0", "--out.dir", folder, "--out.report", "false",
        ]  # fmt: skip
        link = run(["lab", "--json", "--hosts", str(hosts), "--rate", rate, "--", *train])["links"][0]
        (file,) = Path(folder).glob("*/*/events/rank0.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    of_steps = [line for line in lines if line["kind"] == "step"][
        1:-1
    ]  # between the set-up and the last gather
    counted = [sum(n for op, n in line["bytes"].items() if op.startswith("dp.")) for line in of_steps]
    talk = [line["time"]["comm_exposed"] + line["time"]["wait"] for line in of_steps]
    return MeasuredRun(link["sent"], link["received"], median(counted), median(talk))


def row(name: str, plan: Sequence[str], hosts: int, rate: str, cluster: Path) -> str:
    """A line of the table."""
    price = run(["simulate", "--demo", *plan, "--cluster", str(cluster), "--json"])["comm"]["dp"]
    short, long = (measured(plan, hosts, rate, steps) for steps in (SHORT, LONG))
    out, back = ((getattr(long, way) - getattr(short, way)) / (LONG - SHORT) for way in ("sent", "received"))
    mib = [f"{nbytes / 2**20:9.2f}" for nbytes in (price["bytes"], long.counted, out, back)]
    return f"{name:24}{''.join(mib)}{price['seconds']:10.3f}{long.talk:9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--servers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--sync", default="ssp:s=0")
    flags = parser.parse_args()
    plans = [("all-reduce", ["--plan", f"dp={flags.hosts}"])]
    for servers in flags.servers:
        served = ["--plan", f"dp={flags.hosts} sync={flags.sync}", "--launch.servers", str(servers)]
        plans.append((f"{flags.sync}, {servers} server{'s' * (servers > 1)}", served))
    print(f"{'':24}{'MiB a step: first rank, and its link':^36}{'seconds a step':^19}")
    print(f"{'':24}predicted  counted      out       in predicted measured")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "lab.toml")
        cluster.write_text(CLUSTER.format(hosts=flags.hosts, bandwidth=rate_of(flags.rate) / 8e9))
        for name, plan in plans:
            print(row(name, plan, flags.hosts, flags.rate, cluster), flush=True)


if __name__ == "__main__":
    main()

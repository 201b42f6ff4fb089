"""Hosts of a lab that are cut off one after the other and given back, while a run goes on: does it end as undisturbed?

python -m tests.launch.cut_hosts                  # four hosts, each once; the first, with the supervisor, last
python -m tests.launch.cut_hosts --rate 100mbit --plan "dp=4 sync=canonical" --json

Needs root, ip and tc. Leaves with 1 where the run ends otherwise than one on this machine alone, or a cut was not seen.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono_contrib.lab import links
from unisono_contrib.lab.links import LabLink, rate_of
from unisono_contrib.lab.network import LabNetwork
from unisono_contrib.lab.spaces import enter, inside

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "cut"
[model]
kind = "gpt"
n_layer = 3
n_head = 2
d_model = 64
context = 32
[data]
source = "stdlib"
[train]
global_batch = 16
micro_batch = 2
eval_every = 0
[out]
report = true
"""


def weights_of(run_dir: Path) -> str:
    """SHA-256 over names, values and optimiser state of the last checkpoint."""
    from unisono.train.state.checkpoint.read import read_full

    digest = hashlib.sha256()
    for name, x in sorted(read_full(max((run_dir / "checkpoints").glob("step-*"))).items()):
        digest.update(name.encode() + x.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def train(folder: Path, words: list[str], door: str | None = None, **environ: str) -> "subprocess.Popen[str]":
    """`unisono train` in a folder; in the network behind a door."""
    return subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", "cut.toml", "--json", *words],
        cwd=folder, text=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environ},
        preexec_fn=(lambda: enter(door)) if door else None,
    )  # fmt: skip


def steps_made(folder: Path) -> int:
    """Of the newest run in a folder."""
    with suppress(OSError, ValueError, IndexError):
        runs = sorted((folder / "runs" / "cut").iterdir())
        return json.loads((runs[-1] / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def wait_for(folder: Path, step: int, run: "subprocess.Popen[str]") -> None:
    while steps_made(folder) < step and run.poll() is None:
        time.sleep(0.05)


def cut(network: LabNetwork, host: int, up: bool) -> None:
    """Take a host's cable out, or put it back."""
    with inside(network.hosts[host]):
        subprocess.run(["ip", "link", "set", links.DEVICE, "up" if up else "down"], check=True)


def played(network: LabNetwork, folder: Path, words: list[str], steps: int) -> dict[str, Any]:
    """The run in the lab, with every host cut off once. The first is alone then: the supervisor is there."""
    count = len(network.hosts)
    names = [links.host_name(number) for number in range(count)]
    addresses = [links.address(number) for number in range(count)]
    doors = json.dumps(dict(zip(addresses, network.doors, strict=True)))
    shell = f"{sys.executable} -m tests.launch.lab_shell"
    run = train(
        folder,
        [*words, "--hosts", ",".join(addresses), "--launch.shell", shell],
        network.doors[0],
        LAB_DOORS=doors,
    )
    apart = steps // (2 * count)
    for number, host in enumerate([*range(1, count), 0], 1):
        wait_for(folder, 2 * apart * number - apart, run)
        at = steps_made(folder)
        cut(network, host, up=False)
        wait_for(folder, at + apart // 2, run)
        cut(network, host, up=True)
        print(f"{names[host]} cut off at step {at}, back at {steps_made(folder)}", file=sys.stderr)
    out, _ = run.communicate()
    if run.returncode:
        raise SystemExit(f"the run left with {run.returncode}")
    return json.loads(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="dp=4 sync=canonical")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=rate_of, default=0.0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    base = given.keep or Path(tempfile.mkdtemp(prefix="cut-hosts-"))
    words = ["--plan", given.plan, "--train.steps", str(given.steps)]
    found: dict[str, str] = {}
    for name in ("alone", "lab"):
        folder = base / name
        folder.mkdir(parents=True)
        (folder / "cut.toml").write_text(RECIPE)
        if name == "alone":
            out, _ = (run := train(folder, words)).communicate()
            if run.returncode:
                raise SystemExit(f"the undisturbed run left with {run.returncode}")
            told = json.loads(out)
        else:
            with LabNetwork(given.hosts, LabLink(given.rate)) as network:
                told = played(network, folder, words, given.steps)
        found[name] = weights_of(folder / told["run_dir"])
        print(f"{name:6} {told['restarts']} losses, weights and optimiser {found[name][:16]}")
    same = found["alone"] == found["lab"]
    print("the same bits" if same else "OTHER bits")
    return not same


if __name__ == "__main__":
    sys.exit(main())

"""Two hosts whose clocks are wrong by seconds and drift: how well does a run put their steps on one clock?

python -m tests.launch.clocks                       # two networks of this machine, 3 s apart each way, 50 ppm; a minute
python -m tests.launch.clocks --seconds 10 --shift 0.5 --drift 100

Each rank's own clock is made wrong (the fault `clock` of --chaos): `time.time()` and the recorder's. Both ranks are on
one machine, so the kernel's clock says what is right; after each step each writes down how far its shared clock is from
it. Left out are the first seconds, in which a drift cannot be known. Needs root and ip and tc. Leaves with 1 where an
error is above `--most` microseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from unisono.spec.sink import Observer, RunFacts, Sink
from unisono_contrib.lab import links
from unisono_contrib.lab.links import LabLink
from unisono_contrib.lab.network import LabNetwork
from unisono_contrib.lab.spaces import enter

ROOT = Path(__file__).parents[2]
SETTLED = 5.0  # seconds
RECIPE = """
name = "clocks"
[model]
kind = "gpt"
n_layer = 1
n_head = 2
d_model = 32
context = 16
[data]
source = "stdlib"
[train]
steps = 100000
global_batch = 4
micro_batch = 2
eval_every = 0
save_every = 0
[out]
report = false
track = ["{path}:TrueClock"]
"""


class TrueClock(Sink):
    """What the shared clock of each rank is off by, in `true/rankN.txt`: seconds of the run, nanoseconds, those of this
    host's own clock."""

    name = "true_clock"
    every_rank = True

    def open(self, run: RunFacts) -> Observer:
        path = run.run_dir.parent / "true" / f"rank{run.rank}.txt"
        path.parent.mkdir(exist_ok=True)
        return _Compared(run, path)


class _Compared(Observer):
    def __init__(self, run: RunFacts, path: Path) -> None:
        self._recorder, self._file = run.recorder, path.open("w")

    def ended(self, step: int, stop: bool) -> None:
        import time

        clock, readings = self._recorder.host_clock, []
        for _ in range(5):
            before = time.clock_gettime_ns(time.CLOCK_REALTIME)
            at = self._recorder.now_ns()
            after = time.clock_gettime_ns(time.CLOCK_REALTIME)
            readings.append((after - before, at, (before + after) // 2))
        _, at, true = min(readings)
        line = f"{true * 1e-9:.6f} {clock.shared_ns(at) - true} {clock.here_ns(at) - true} {clock.fit.error_ns:.0f}"
        self._file.write(line + "\n")
        self._file.flush()

    def observe(self, steps: object) -> None:
        return None


@dataclass(frozen=True)
class ClockErrors:
    """Of one rank, microseconds: its own clock's at the end, the shared clock's median and most, and what it said."""

    own: float
    median: float
    most: float
    said: float
    steps: int


def measured(path: Path) -> ClockErrors:
    """What a rank has written."""
    rows = [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
    clock_was_wrong = next(i for i, row in enumerate(rows) if abs(row[2]) > 1e6)
    since = rows[clock_was_wrong][0] + SETTLED
    errors = [abs(row[1]) / 1e3 for row in rows if row[0] > since]
    return ClockErrors(
        rows[-1][2] / 1e3, statistics.median(errors), max(errors), rows[-1][3] / 1e3, len(errors)
    )


def played(folder: Path, seconds: float, shift: float, drift: float) -> list[ClockErrors]:
    """A run over two hosts of a lab, `shift` seconds before and behind, for so many seconds."""
    (folder / "clocks.toml").write_text(RECIPE.format(path=Path(__file__).resolve()))
    chaos = (
        f"clock:who=0:step=2:seconds={-shift}:drift={-drift} clock:who=1:step=2:seconds={shift}:drift={drift}"
    )
    shell = f"{sys.executable} -m tests.launch.lab_shell"
    with LabNetwork(2, LabLink(0.0)) as network:
        addresses = [links.address(number) for number in range(2)]
        doors = dict(zip(addresses, network.doors, strict=True))
        words = ["--plan", "dp=2", "--chaos", chaos, "--hosts", ",".join(addresses), "--launch.shell", shell]
        run = subprocess.Popen(
            [sys.executable, "-m", "unisono", "train", "clocks.toml", "--quiet", *words],
            cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "LAB_DOORS": json.dumps(doors)},
            preexec_fn=lambda: enter(network.doors[0]),
        )  # fmt: skip
        try:
            _, err = run.communicate(timeout=seconds)
            raise SystemExit(f"the run left with {run.returncode}: {err[-2000:]}")
        except subprocess.TimeoutExpired:
            run.terminate()
            run.communicate(timeout=60)
    (true,) = folder.glob("runs/clocks/true")
    return [measured(true / f"rank{rank}.txt") for rank in range(2)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--drift", type=float, default=50.0, help="ppm")
    parser.add_argument("--most", type=float, default=200.0, help="microseconds that an error may be")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clocks-") as folder:
        errors = played(Path(folder), flags.seconds, flags.shift, flags.drift)
    for rank, one in enumerate(errors):
        print(
            f"rank {rank}: own clock off by {one.own / 1e6:+.6f} s; shared clock by {one.median:.1f} us in the median,"
            f" {one.most:.1f} us at most, over {one.steps} steps; it said {one.said:.1f} us"
        )
    return int(max(one.most for one in errors) > flags.most)


if __name__ == "__main__":
    sys.exit(main())

"""What a lost rank costs: ours beside torchft, NVRx, and torchrun with DDP and torch's checkpoints every 10 steps.

All train the same model on the same samples on two ranks of one thread, in rounds that take turns; in each, rank 1 is
killed (then: stopped) once. Printed are seconds from the fault to its detection and to the first step that had not been
made before, and how many steps were made again. Then all run for a while with a kill every ten seconds; goodput is the
steps that were made over those of a run of the same kind that is left alone. The others' loops are written by hand in
benchmarks/recovery_peers.py:

torchrun  with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most of its restarts hang or burn others
torchft   takes a replica for dead after one second instead of five, and a sum for late; until there is a new one its
          steps are made on half of the batch, and count as halves
nvrx      has a spare process and moves no state: its function goes back to a checkpoint, as torchrun does; it starts no
          new processes, so it has no goodput under many kills

pip install torchft==0.2.0 nvidia-resiliency-ext==0.4.1   # else they are left out
python benchmarks/recovery.py                             # about twenty minutes
python benchmarks/recovery.py --rounds 1 --minutes 0
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.config.write import resolved_toml
from unisono_contrib.programs.chaos import sequel

PATIENCE = 30.0
"""Seconds after a fault in which a side may come back."""
PEERS = {"torchft": "torchft", "nvrx": "nvidia_resiliency_ext"}
"""Sides that need a package that is not ours: its module."""
INSTALL = {"torchft": "torchft==0.2.0", "nvrx": "nvidia-resiliency-ext==0.4.1"}
STEPS = 1_000_000


def recipe(folder: Path) -> Recipe:
    """A GPT of 0.8 M parameters, whose steps take some tens of milliseconds."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(" ".join(f"{i * i % 977} of {i % 89}" for i in range(60_000)))
    return Recipe(
        name="recovery",
        seed=1,
        model=ModelConfig(n_layer=4, n_head=4, d_model=128, context=64),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=STEPS, global_batch=16, micro_batch=8, eval_every=0, save_every=0),
    )


@dataclass(frozen=True)
class Cost:
    """Of one fault: seconds until it was known and until a new step, None for not in time; steps made twice."""

    detected: float | None
    back: float | None
    lost: int


# Both sides, from outside.


@contextmanager
def peer(side: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A loop of `recovery_peers` on two ranks, restarted as often as it takes."""
    loop = [str(Path(__file__).with_name("recovery_peers.py")), side, str(folder)]
    elastic = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1000",
    ]
    command = [sys.executable, *(elastic if side == "torchrun" else []), *loop]
    extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with _under(command, extra, folder) as process:
        yield process


@contextmanager
def unisono(folder: Path, chaos: str) -> Iterator[subprocess.Popen]:
    """`unisono train` on two ranks."""
    path = folder / "recipe.toml"
    path.write_text(resolved_toml(resolve(recipe(folder), "dp=2", 2)))
    command = [sys.executable, "-m", "unisono", "train", str(path), "--out.dir", str(folder / "runs")]
    command += ["--launch.threads_per_rank", "1", "--out.report", "false"]
    command += ["--chaos", chaos] if chaos else []
    with _under(command, {}, folder) as process:
        yield process


@contextmanager
def _under(command: list[str], extra: dict[str, str], folder: Path) -> Iterator[subprocess.Popen]:
    with (folder / "output.txt").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **extra}, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in _pids(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in sorted(folder.glob("pid-*")) if path.read_text()]


def until(what: Callable[[], Any], seconds: float, process: subprocess.Popen) -> Any:
    """What `what` says as soon as it says something; None when it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if got := what():
            return got
        time.sleep(0.005)
    return None


def log_of(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON, but for a last one that is not whole."""
    try:
        return [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
    except OSError:
        return []


def peer_fault(side: str, folder: Path, number: int) -> Cost:
    """A signal to rank 1 five steps after a checkpoint."""
    with peer(side, folder) as process:
        due = lambda: [x for x in log_of(folder / "steps-0.jsonl") if x["step"] >= 25]
        if until(due, 120.0, process) is None:
            print(f"{side} did not start: {(folder / 'output.txt').read_text()[-300:]}", flush=True)
            return Cost(None, None, 0)
        other, victim = _pids(folder)
        begun = time.monotonic()
        os.kill(victim, number)
        knows = lambda: (
            (not Path(f"/proc/{other}").exists() or _zombie(other))
            if side == "torchrun"
            else [x for x in log_of(folder / "known.jsonl") if x["t"] > begun]
        )
        known = time.monotonic() - begun if until(knows, PATIENCE, process) else None
        before = [x for x in _made(folder) if x["t"] <= begun]
        most = max(line["step"] for line in before)
        new = lambda: [
            x for x in _made(folder) if x["step"] > most + 1 or (x["t"] > begun and x["step"] > most)
        ]
        back = until(new, PATIENCE, process)
        if back is None:
            return Cost(known, None, 0)
        again = [x for x in _made(folder) if x["t"] > begun and x["step"] <= most]
        return Cost(known, min(x["t"] for x in back) - begun, len({x["step"] for x in again}))


def _made(folder: Path) -> list[dict[str, Any]]:
    """Steps that ranks of a peer have told."""
    return [line for path in sorted(folder.glob("steps-*.jsonl")) for line in log_of(path)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def our_fault(folder: Path, number: int) -> Cost:
    """The same signal in the middle of step 25."""
    what = {signal.SIGKILL: "kill", signal.SIGSTOP: "stop"}[signal.Signals(number)]
    with unisono(folder, f"{what}:who=1:step=25:phase=backward") as process:

        def row() -> dict[str, Any] | None:
            rows = [
                row for run in (folder / "runs").glob("*/*") for row in sequel.what_followed(sequel.read(run))
            ]
            return next((row for row in rows if row.get("next") is not None), None)

        got = until(row, 180.0, process)
        if got is None:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])
        (run,) = (path for path in (folder / "runs").glob("*/*") if (path / sequel.FILE).exists())
        met = [line["step"] for line in sequel.read(run) if line["event"] == "met" and line["epoch"]]
        return Cost(got["detected"], got["next"], max(0, got["at_step"] - 1 - min(met)))


def made_in(seconds: float, folder: Path, side: str, kills: bool) -> float:
    """Steps that a run has made so long after its first, with a kill every ten seconds or none."""
    times = [10.0 * i for i in range(1, int(seconds // 10) + 1) if 10.0 * i < seconds] if kills else []
    ours = side == "ours"
    steps = lambda: (
        log_of(next((folder / "runs").glob("*/*/metrics.jsonl"), folder / "none")) if ours else _made(folder)
    )
    chaos = " ".join(f"kill:who={i % 2}:after={at:g}" for i, at in enumerate(times))
    with unisono(folder, chaos) if ours else peer(side, folder) as process:
        if until(steps, 180.0, process) is None:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])
        begun = time.monotonic()
        for i, at in enumerate(() if ours else times):
            time.sleep(max(0.0, begun + at - time.monotonic()))
            with suppress(ProcessLookupError):
                os.kill(_pids(folder)[i % 2], signal.SIGKILL)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        shares: dict[int, float] = {}
        for line in steps():
            shares[line["step"]] = max(shares.get(line["step"], 0.0), line.get("share", 1.0))
        return sum(shares.values())


def shown(costs: list[Cost]) -> str:
    """Medians, and the greatest."""

    def times(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return f"{f'not in {PATIENCE:.0f} s':>17}"
        missing = f" ({len(values) - len(known)} never)" if len(known) < len(values) else ""
        return f"{statistics.median(known):>8.2f} {max(known):>8.2f}{missing}"

    lost = statistics.median(cost.lost for cost in costs) if any(c.back is not None for c in costs) else None
    back = times([c.back for c in costs])
    return f"{times([c.detected for c in costs])}  {back}  {'-' if lost is None else f'{lost:g}':>10}"


def _there(side: str, module: str) -> bool:
    if find_spec(module) is None:
        print(f"{side} is left out: no module {module} (pip install {INSTALL[side]})", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--goodput", type=float, default=60.0, help="seconds of each run under kills")
    parser.add_argument(
        "--minutes", type=int, default=1, help="such runs of each side, with and without; 0: none"
    )
    parser.add_argument("--sides", nargs="+", choices=("ours", "torchrun", *PEERS), help="some of them")
    given = parser.parse_args()
    sides = given.sides or [
        "ours",
        "torchrun",
        *(side for side, module in PEERS.items() if _there(side, module)),
    ]
    costs: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(given.rounds):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for side in sides:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                    folder = Path(name)
                    cost = our_fault(folder, number) if side == "ours" else peer_fault(side, folder, number)
                    costs.setdefault((number.name, side), []).append(cost)
    print(f"{'':<20} {'detected, s':>17}  {'next new step, s':>17}  {'steps lost':>10}")
    print(f"{'':<20} {'median':>8} {'max':>8}  {'median':>8} {'max':>8}  {'median':>10}")
    for (name, side), some in sorted(costs.items()):
        print(f"{name:<8} {side:<11} {shown(some)}", flush=True)
    made: dict[str, list[tuple[float, float]]] = {side: [] for side in sides if side != "nvrx"}
    for _ in range(given.minutes):
        for side in made:
            pair = []
            for kills in (False, True):
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                    pair.append(made_in(given.goodput, Path(name), side, kills))
            made[side].append((pair[1], pair[0]))
    for side, pairs in made.items() if given.minutes else ():
        ratios = " ".join(f"{with_ / without:.1%}" for with_, without in pairs)
        median = statistics.median(with_ / without for with_, without in pairs)
        told = f"{pairs[0][0]:.0f} steps in {given.goodput:.0f} s with a kill every 10 s, {pairs[0][1]:.0f} without"
        print(f"goodput  {side:<11} {median:.1%} of {ratios}; first {told}", flush=True)
    print(f"{given.rounds} rounds, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return None


if __name__ == "__main__":
    main()

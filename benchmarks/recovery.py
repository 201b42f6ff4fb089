"""What a lost rank costs: ours beside plain torchrun with DDP and torch's distributed checkpoints every 10 steps.

Both train the same model on the same samples on two ranks of one thread, in rounds that take turns; in each, rank 1 is
killed (then: stopped) once. Printed are seconds from the fault to its detection and to the first step that had not been
made before, and how many steps were made again. Then both run for a while with a kill every ten seconds; goodput is the
steps that were made over those of a run of the same kind that is left alone. torchrun gets
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most of its restarts hang or burn others.

python benchmarks/recovery.py                       # about eight minutes
python benchmarks/recovery.py --rounds 1 --goodput 0
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
from pathlib import Path
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.config.write import resolved_toml
from unisono.programs.chaos import sequel

SAVED = 10
PATIENCE = 60.0
"""Seconds after a fault in which torchrun may come back."""
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


# torchrun's side: one rank.


def play(folder: Path) -> None:
    """A loop as one writes it by hand: DDP, AdamW, a checkpoint every SAVED steps, resumed where there is one."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from peers import Task, adamw, batches, model_of
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    from unisono.train.data.load import load
    from unisono.train.session import place_of

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    told = resolve(recipe(folder), "dp=2", world).recipe
    task = Task(told, 1, place_of(rank, world, rank, "gloo", 600.0), load(told.data, told.model))
    model = DistributedDataParallel(model_of(task))
    optimizer, get, made = adamw(model, told.train), batches(task), 0
    saved = sorted(folder.glob("step-*/.metadata"))
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        made = int(saved[-1].parent.name.removeprefix("step-"))
    with (folder / f"steps-{rank}.jsonl").open("a") as log:
        while True:
            inputs, targets = get(made)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), told.train.clip or 1e9)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            made += 1
            log.write(json.dumps({"t": time.monotonic(), "step": made}) + "\n")
            log.flush()
            if made % SAVED == 0:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / f"step-{made:08d}")


@dataclass(frozen=True)
class Cost:
    """Of one fault: seconds until it was known and until a new step, None for not in time; steps made twice."""

    detected: float | None
    back: float | None
    lost: int


# Both sides, from outside.


@contextmanager
def torchrun(folder: Path) -> Iterator[subprocess.Popen]:
    """The loop above on two ranks, restarted as often as it takes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "1000", __file__, "--play", str(folder)]  # fmt: skip
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
            process.kill()
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


def torchrun_fault(folder: Path, number: int) -> Cost:
    """A signal to rank 1 five steps after a checkpoint."""
    steps = folder / "steps-0.jsonl"
    with torchrun(folder) as process:
        due = lambda: [x for x in log_of(steps) if x["step"] >= 2 * SAVED + 5]
        if until(due, 120.0, process) is None:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])
        other, victim = _pids(folder)
        begun = time.monotonic()
        os.kill(victim, number)
        detected = until(lambda: not Path(f"/proc/{other}").exists() or _zombie(other), PATIENCE, process)
        known = time.monotonic() - begun if detected else None
        made = log_of(steps)
        most = max(line["step"] for line in made)
        new = lambda: [line["t"] for line in log_of(steps) if line["step"] > most]
        back = until(new, PATIENCE, process) if detected else None
        if back is None:
            return Cost(known, None, 0)
        return Cost(known, back[0] - begun, most - log_of(steps)[len(made)]["step"] + 1)


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


def made_in(seconds: float, folder: Path, ours: bool, kills: bool) -> int:
    """Steps that a run has made so long after its first, with a kill every ten seconds or none."""
    times = [10.0 * i for i in range(1, int(seconds // 10) + 1) if 10.0 * i < seconds] if kills else []
    steps = lambda: log_of(
        next((folder / "runs").glob("*/*/metrics.jsonl"), folder / "none")
        if ours
        else folder / "steps-0.jsonl"
    )
    chaos = " ".join(f"kill:who={i % 2}:after={at:g}" for i, at in enumerate(times))
    with unisono(folder, chaos) if ours else torchrun(folder) as process:
        if until(steps, 180.0, process) is None:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])
        begun = time.monotonic()
        for i, at in enumerate(() if ours else times):
            time.sleep(max(0.0, begun + at - time.monotonic()))
            with suppress(ProcessLookupError):
                os.kill(_pids(folder)[i % 2], signal.SIGKILL)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        return max(line["step"] for line in steps())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--goodput", type=float, default=60.0, help="seconds of each run under kills; 0 for none"
    )
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        return play(given.play)
    sides = {"ours": our_fault, "torchrun": torchrun_fault}
    costs: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(given.rounds):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for side, fault in sides.items():
                with tempfile.TemporaryDirectory() as folder:
                    costs.setdefault((number.name, side), []).append(fault(Path(folder), number))
    print(f"{'':<20} {'detected, s':>17}  {'next new step, s':>17}  {'steps lost':>10}")
    print(f"{'':<20} {'median':>8} {'max':>8}  {'median':>8} {'max':>8}  {'median':>10}")
    for (name, side), some in sorted(costs.items()):
        print(f"{name:<8} {side:<11} {shown(some)}", flush=True)
    for side in sides if given.goodput else ():
        made = []
        for kills in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                made.append(made_in(given.goodput, Path(folder), side == "ours", kills))
        told = f"{made[1]} steps in {given.goodput:.0f} s with a kill every 10 s, {made[0]} without"
        print(f"goodput  {side:<11} {made[1] / made[0]:.1%}: {told}", flush=True)
    print(f"{given.rounds} rounds, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return None


if __name__ == "__main__":
    main()

"""Asked to end at random moments, then started again until it is done: `python -m tests.launch.preemption --tries 20`.

Each try starts a tiny run with `--resume auto`, sends SIGTERM or SIGUSR1 to the launcher, to all ranks or to some, while it
starts or while it trains, now and then a second time, and looks at what is left: exit 75 within ten seconds, and either a
whole checkpoint or nothing half made. The same command then goes on to the end, and the SHA-256 of its last checkpoint's
tensors is that of a run that nobody disturbed. Ranks are the launcher's own, or started by hand as `srun` would.
"""

import argparse
import contextlib
import hashlib
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ports import kept_port
from tests.verbs import jobs
from unisono.train.state.checkpoint import latest, read_full, verify_folder

ROOT = Path(__file__).parents[2]
WITHIN = 10.0
"""Seconds from the signal to the end, which is the default of launch.grace."""
STEPS = 100
COMMAND = ("train", "recipe.toml", "--plan", "dp=2", "--train.steps", str(STEPS), "--train.save_every", "30")
AUTO = (*COMMAND, "--resume", "auto")


@dataclass(frozen=True)
class Case:
    """whom: launcher, one, all. step: after which the signal comes; 0: while the run starts, after `share` of the time
    that this takes."""

    starter: str
    whom: str
    number: signal.Signals
    step: int
    share: float
    twice: bool

    def __str__(self) -> str:
        moment = f"after step {self.step}" if self.step else f"at {self.share:.2f} of the start"
        return f"{self.starter}, {self.number.name} to {self.whom} {moment}{', twice' if self.twice else ''}"


def drawn(dice: random.Random) -> Case:
    """A case; in two of five the run is starting yet."""
    starter = dice.choice(("own", "own", "by hand"))
    whom = dice.choice(("launcher", "one", "all") if starter == "own" else ("one", "all"))
    step = 0 if dice.random() < 0.4 else dice.randrange(1, STEPS - 20)
    number = dice.choice((signal.SIGTERM, signal.SIGUSR1))
    return Case(starter, whom, number, step, dice.uniform(0.0, 1.2), dice.random() < 0.3)


@contextlib.contextmanager
def under_way(place: Path, starter: str, real: bool, *argv: str) -> Iterator[list[jobs.Job]]:
    """The command's processes: the launcher alone, or the ranks. real: Pythons that import torch themselves."""
    program = jobs.UNISONO if real else None
    with contextlib.ExitStack() as stack:
        if starter == "own":
            yield [stack.enter_context(jobs.started(place, *argv, program=program))]
            return
        port = str(stack.enter_context(kept_port()))
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        path = {"PYTHONPATH": f"{ROOT}:{ROOT}/src"}
        yield [
            stack.enter_context(
                jobs.started(place, *argv, program=program, environ={"RANK": str(rank), **meet, **path})
            )
            for rank in range(2)
        ]


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM; before that nobody of ours is there to hear it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def victims(case: Case, started: list[jobs.Job], dice: random.Random) -> list[int]:
    """Who is asked: processes of the run, or its launcher while it has no ranks."""
    pids = [job.process.pid for job in started]
    if case.starter == "own" and case.whom != "launcher":
        with contextlib.suppress(psutil.Error, IndexError, StopIteration):  # no helper yet
            pids = started[0].ranks() or pids
    return pids if case.whom == "all" or len(pids) < 2 else [dice.choice(pids)]


def ask(case: Case, started: list[jobs.Job], seconds: float, dice: random.Random) -> float:
    """Wait for the moment, send the signals; returns when the first was sent."""
    gone = os.pidfd_open(started[0].process.pid)
    try:
        while (
            not all(listens(job.process.pid) for job in started)
            and not select.select([gone], [], [], 0.002)[0]
        ):
            pass
        if case.step:
            while not made(started[0].cwd) >= case.step and not select.select([gone], [], [], 0.002)[0]:
                pass
        else:
            select.select([gone], [], [], case.share * seconds)
        sent = time.monotonic()
        for _ in range(1 + case.twice):
            for pid in victims(case, started, dice):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, case.number)
            select.select([gone], [], [], dice.uniform(0.0, 0.3))
        return sent
    finally:
        os.close(gone)


def made(place: Path) -> int:
    """Steps that a run has written down."""
    return max(map(jobs.lines, jobs.runs_of(place)), default=0)


def left_over(place: Path) -> list[str]:
    """What is wrong in the run folders: a checkpoint that is not whole, one half made."""
    wrong = []
    for run in jobs.runs_of(place):
        newest = latest(run)
        wrong += [f"{newest.name}: {said}" for said in verify_folder(newest)] if newest is not None else []
        wrong += [f"half made: {path.name}" for path in (run / "checkpoints").glob("*.*")]
    return wrong


def digest(place: Path) -> str:
    """SHA-256 of all tensors of the newest checkpoint of the only run; "" where it is not the last step's."""
    (run,) = jobs.runs_of(place)
    newest = latest(run)
    if newest is None or newest.name != f"step-{STEPS:06d}":
        return ""
    found = hashlib.sha256()
    for name, tensor in sorted(read_full(newest).items()):
        found.update(name.encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def played(
    place: Path, case: Case, seconds: float, undisturbed: str, real: bool, dice: random.Random
) -> list[str]:
    """What was wrong in a try."""
    jobs.folder_with(place)
    recipe(place)
    with under_way(place, case.starter, real, *AUTO) as started:
        sent = ask(case, started, seconds, dice)
        ends = [job.done() for job in started]
        took = time.monotonic() - sent
    codes = {end.code for end in ends}
    wrong = [*left_over(place)]
    if codes not in ({75}, {0}):
        wrong.append(f"exit {codes}: {ends[0].err[-1500:]}")
    if codes == {75} and took > WITHIN:
        wrong.append(f"{took:.1f} s")
    wrong += [f"left behind {end.left}" for end in ends if end.left]
    print(f"  {case}: exit {codes}, {took:.1f} s, {kept(place)}", flush=True)
    with under_way(place, case.starter, real, *AUTO) as started:
        again = [job.done() for job in started]
    if {end.code for end in again} != {0}:
        wrong.append(f"did not go on: {again[0].err[-1500:]}")
    elif digest(place) != undisturbed:
        wrong.append("other bits")
    elif len(jobs.losses(jobs.runs_of(place)[0])) != STEPS:
        wrong.append("lines of metrics are missing")
    return wrong


def kept(place: Path) -> str:
    """The checkpoint that is there, in words."""
    found = [newest.name for run in jobs.runs_of(place) if (newest := latest(run)) is not None]
    return ", ".join(found) or ("no checkpoint" if jobs.runs_of(place) else "no run folder")


def recipe(place: Path) -> None:
    """Text by a relative path, so that all tries have one recipe."""
    file = place / "recipe.toml"
    file.write_text(file.read_text().replace(f"text:{place / 'words.txt'}", "text:words.txt"))


def whole(place: Path, real: bool) -> tuple[str, float]:
    """(digest, seconds from the first handler to the first step) of a run that nobody disturbs."""
    jobs.folder_with(place)
    recipe(place)
    with under_way(place, "own", real, *COMMAND) as (job,):
        while not listens(job.process.pid):
            assert not job.ends_within(0.002)
        begun = time.monotonic()
        job.steps(1)
        seconds = time.monotonic() - begun
        done = job.done()
    assert done.code == 0, done.err
    return digest(place), seconds


def tries(count: int, seed: int, real: bool, folder: Path) -> int:
    """How many of so many tries were right; each is told in a line. real: Pythons that import torch themselves."""
    dice, right = random.Random(seed), 0
    undisturbed, seconds = whole(folder / "whole", real)
    print(f"undisturbed: {undisturbed[:16]}, {STEPS} steps, {seconds:.1f} s to the first", flush=True)
    for turn in range(count):
        wrong = played(folder / str(turn), drawn(dice), seconds, undisturbed, real, dice)
        right += not wrong
        if wrong:
            print(f"  WRONG  {'; '.join(wrong)}", flush=True)
    print(f"{right} of {count} right: exit 75 within {WITHIN:g} s, nothing half made, then the same bits")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--forked", action="store_true", help="ranks from a process that has torch: quicker starts"
    )
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    with tempfile.TemporaryDirectory() as folder:
        return int(tries(asked.tries, asked.seed, not asked.forked, Path(folder)) < asked.tries)


if __name__ == "__main__":
    sys.exit(main())

"""A piece of a trial: `unisono train` as a child process, and what came of it. No torch.

`python -m unisono_contrib.sweep.trial PID COMMAND...` is the command, which is asked to stop (SIGTERM: it saves and
ends) when the process PID, its parent, dies. So a sweep that is killed leaves nobody behind.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.layers import PREFIX
from unisono.launch.parent import PR_SET_PDEATHSIG
from unisono.observe.files import write_whole
from unisono.observe.metrics import read_steps
from unisono.spec.runs import CHECKPOINTS, CONFIG, PARENT
from unisono.spec.words import is_number

RECIPE, LOCK, LOG, ANSWER = "recipe.toml", "lock", "log.txt", "answer.json"
_WAIT = 60.0
"""Seconds in which a trial of a sweep that was killed a moment ago may save and end."""
_DIVERGED = ("U-N01", "U-N02", "U-N03")
_HOPELESS = (2, 5)  # exit codes of what would fail in the same way again: a wrong value, no memory


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What is asked of a worker. folder: the trial's own, in which its recipe lies. until: the step after which it
    stops, 0 for the recipe's last. grace: seconds in which it may save once it is asked to stop. environ: all
    variables of its process."""

    number: int
    folder: str
    until: int
    metric: str
    grace: float
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PieceOutcome:
    """How a piece ended. step, value: where the metric was measured, None where it is no number. why: the error in a
    line, "" for none. again: whether another try may help. stopped: it was asked to."""

    step: int = 0
    value: float | None = None
    run_dir: str = ""
    why: str = ""
    again: bool = False
    stopped: bool = False
    seconds: float = 0.0


@dataclass
class TrialProcess:
    """`unisono train` at work on a piece."""

    job: TrialJob
    process: subprocess.Popen[bytes]
    began: float
    stopping: bool = False

    def stop(self) -> None:
        """Ask it to save and end."""
        self.stopping = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """End it now, with all of its process group; its ranks die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> PieceOutcome | None:
        """What came of it; None if it takes longer than that."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return outcome(self.job, code, self.stopping, time.monotonic() - self.began)


def start(job: TrialJob) -> TrialProcess:
    """Start a piece. Whoever worked on this trial before, for a sweep that was killed, has to end first."""
    folder = Path(job.folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(lock, folder)
        words = ["train", str(folder / RECIPE), "--resume", "auto", "--json", "--quiet"]
        command = [
            sys.executable,
            "-m",
            "unisono",
            *words,
            *(["--until", str(job.until)] if job.until else []),
        ]
        with open(folder / ANSWER, "wb") as answer, open(folder / LOG, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "unisono_contrib.sweep.trial", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL, stdout=answer, stderr=log, env=dict(job.environ),
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip
    finally:
        os.close(lock)  # the child holds it until it has ended, and with it all that it started
    return TrialProcess(job, process, time.monotonic())


def _take(lock: int, folder: Path) -> None:
    """Lock a trial. Raises TimeoutError where another process does not let go of it."""
    until = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another process trains in {folder}") from None
            time.sleep(0.05)
        except OSError:  # a file system without locks: the run's own folder is the next guard
            return


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a trial: those of the sweep without those that set keys, which its recipe has already."""
    return {k: v for k, v in environ.items() if not k.startswith(PREFIX) or k.startswith(f"{PREFIX}_")}


def outcome(job: TrialJob, code: int, stopping: bool, seconds: float) -> PieceOutcome:
    """What a piece that has ended with this exit code came to."""
    said = _answer(Path(job.folder) / ANSWER)
    if code == 0 and isinstance(said.get("steps"), int):
        run_dir = str(said.get("run_dir", ""))
        return PieceOutcome(said["steps"], _value(job.metric, said, Path(run_dir)), run_dir, seconds=seconds)
    if stopping:
        return PieceOutcome(stopped=True, seconds=seconds)
    why = str(said.get("what") or _last_line(Path(job.folder) / LOG) or _how(code))
    if said.get("code") in _DIVERGED:
        runs = sorted(Path(job.folder).glob(f"*/{CONFIG}"))
        return PieceOutcome(
            job.until, None, str(runs[-1].parent) if runs else "", f"diverged: {why}", seconds=seconds
        )
    return PieceOutcome(why=why, again=code not in _HOPELESS, seconds=seconds)


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _answer(file: Path) -> dict[str, Any]:
    """The object on a trial's stdout; nothing where it came to none."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _last_line(log: Path) -> str:
    """The error that a trial told last, in a line."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error U-")), "")
    return ""


def _value(metric: str, summary: Mapping[str, Any], run_dir: Path) -> float | None:
    """The metric at the end of a piece: of the summary, or of the last step that has it."""
    metrics = summary.get("val_metrics") or {}
    value = summary.get(metric, metrics.get(metric, metrics.get(metric.removeprefix("val_"))))
    if value is None:
        steps, _ = read_steps(run_dir / "metrics.jsonl")
        value = next((step[metric] for step in reversed(steps) if metric in step), None)
    return float(value) if value is not None and is_number(value) else None


def branch(source: Path, step: int, folder: Path) -> Path:
    """A new run in `folder` that begins with a checkpoint of the run `source`: the checkpoint is copied, and
    `parent.json` names it. One that is there already is left alone. Returns its folder."""
    parent = {"run": str(source), "checkpoint": f"step-{step:06d}"}
    for known in folder.glob(f"*/{PARENT}"):
        if json.loads(known.read_text(encoding="utf-8")) == parent:
            return known.parent
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-from{step}"
    aside = folder / f".{name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint = Path(CHECKPOINTS, parent["checkpoint"])
    (aside / CHECKPOINTS).mkdir(parents=True)
    shutil.copytree(source / checkpoint, aside / checkpoint)
    for name_of in (CONFIG, "env.json"):
        shutil.copy(source / name_of, aside / name_of)
    write_whole(aside / "latest", f"{checkpoint}\n")
    write_whole(aside / PARENT, json.dumps(parent))
    os.replace(aside, folder / name)
    return folder / name


@contextlib.contextmanager
def ending(processes: Mapping[int, TrialProcess], grace: float) -> Iterator[None]:
    """At its end all processes that are still there are asked to save and end, and killed after `grace` seconds or at
    the next Ctrl-C. Nobody stays behind."""
    try:
        yield
    finally:
        left: Sequence[TrialProcess] = [*processes.values()]
        try:
            for process in left:
                process.stop()
            until = time.monotonic() + grace + 5.0
            for process in left:
                process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in left:
                if process.process.poll() is None:
                    process.kill()
                    process.wait()


def _be(parent: int, command: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.execv(command[0], [*command])


if __name__ == "__main__":
    _be(int(sys.argv[1]), sys.argv[2:])

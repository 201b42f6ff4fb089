"""`unisono` as a user starts it: a process of its own whose family can be watched, stopped, killed and looked for."""

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked import MARK, Forked

UNISONO = (sys.executable, "-m", "unisono")
SECONDS = 100.0
"""How long anything here may take on a busy machine before it counts as hung."""

RECIPE = """\
name = "tiny"
plan = "dp=2 pp=2"
[model]
n_layer = 2
n_head = 2
d_model = 16
context = 8
dropout = 0.1
[data]
source = "text:{text}"
[train]
steps = 30
global_batch = 8
micro_batch = 2
dtype = "{dtype}"
save_every = 3
[out]
dir = "runs"
report = false
"""

MODEL = '''\
"""A user's models, some of which go wrong in training step 4, the blocking one in step 3."""
import os
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, vocab, mistake=None, good=4):
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(vocab, 8), nn.Linear(8, 8), nn.Linear(8, vocab)
        self.mistake, self.good, self.calls = mistake, good, 0

    def forward(self, x):
        self.calls += self.training
        h = self.middle(self.embed(x))
        if self.calls > self.good and self.mistake:
            h = self.mistake(h)
        return self.out(h)


class Burst(nn.Module):
    def forward(self, h):
        return h / 0 if os.environ["RANK"] == "1" else h


def raises(h):
    if os.environ["RANK"] == "1":
        raise ValueError("the tokens ran out")
    return h


def blocks(h):
    os.read(os.pipe()[0], 1)  # for ever


def good(vocab): return Tiny(vocab)
def raising(vocab): return Tiny(vocab, raises)
def bursting(vocab): return Tiny(vocab, Burst())
def blocking(vocab): return Tiny(vocab, blocks, 3)
'''

USERS = """\
name = "mine"
plan = "dp=2"
[model]
kind = "model.py:{function}"
context = 8
[data]
source = "text:{text}"
[train]
steps = 12
global_batch = 8
save_every = 3
[out]
dir = "runs"
report = false
"""


def words(count: int = 3000) -> str:
    """A text with a pattern to learn, the same each time."""
    known = "the a of to in is on by it or be at as an we us if so do no".split()
    state, out = 1, []
    for _ in range(count):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        out.append(known[(state >> 16) % len(known)])
    return " ".join(out)


def folder_with(place: Path, recipe: str = RECIPE, **values: str) -> Path:
    """A working folder with recipe.toml, words.txt and model.py."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "words.txt").write_text(words())
    (place / "model.py").write_text(MODEL)
    filled = recipe.format(**{"text": str(place / "words.txt"), "dtype": "float32", **values})
    (place / "recipe.toml").write_text(filled)
    return place


@dataclass(frozen=True)
class Done:
    """How a command ended. `left`: processes of its family that were still there some seconds after."""

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[int, ...]

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1 and self.out.endswith("\n"), self.out
        return json.loads(self.out)

    @property
    def blocks(self) -> list[str]:
        """All error blocks on stderr."""
        return re.findall(r"^error U-\S+  .*(?:\n  (?:where|likely|try) .*)*", self.err, flags=re.M)

    @property
    def block(self) -> str:
        """The one error block, which must be the last thing on stderr."""
        assert len(self.blocks) == 1, self.err
        assert self.err.endswith(self.blocks[0] + "\n"), self.err
        return self.blocks[0]


@dataclass
class Job:
    """A `unisono` command under way, in its own session. `lines`: what it has said on stderr so far."""

    process: subprocess.Popen[str] | Forked
    cwd: Path
    mark: str
    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    _spoke: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._spoke:
                self.lines.append(line)
                self._spoke.notify_all()

    def hear(self, text: str) -> None:
        """Until it says `text` on stderr."""
        with self._spoke:
            heard = self._spoke.wait_for(lambda: any(text in line for line in self.lines), SECONDS)
        assert heard, "".join(self.lines)

    def steps(self, count: int) -> Path:
        """Until `count` lines are in the metrics of its newest run; returns that run's folder."""

        def reached() -> Path | None:
            newest = runs_of(self.cwd)[-1:]
            return newest[0] if newest and lines(newest[0]) >= count else None

        return self._until(reached, f"no {count} steps")

    def there(self, name: str) -> Path:
        """Until there is a file of that name in its working folder; returns the newest run's folder."""
        return self._until(
            lambda: runs_of(self.cwd)[-1] if (self.cwd / name).exists() else None, f"no {name}"
        )

    def kept(self, name: str) -> Path:
        """Until its newest run would go on from checkpoint `name`; returns that run's folder."""

        def reached() -> Path | None:
            latest = [run / "latest" for run in runs_of(self.cwd)[-1:] if (run / "latest").exists()]
            return latest[0].parent if latest and latest[0].read_text().strip().endswith(name) else None

        return self._until(reached, f"no {name}")

    def _until(self, reached: Callable[[], Path | None], what: str) -> Path:
        gone = os.pidfd_open(self.process.pid)
        try:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                if (found := reached()) is not None:
                    return found
                assert not select.select([gone], [], [], 0.005)[0], "".join(self.lines)
        finally:
            os.close(gone)
        raise AssertionError(f"{what} in {SECONDS} s: {''.join(self.lines)}")

    def made(self) -> None:
        """Until its run folder is there: it waits for torch, and has handlers for signals."""
        self._until(lambda: next(iter(runs_of(self.cwd)), None), "no run folder")

    def family(self) -> list[psutil.Process]:
        """Supervisor, helper and all ranks: every process below this one, the guardian."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[int]:
        """The ranks' processes: the helper's children."""
        helper = next(one for one in self.family() if os.getsid(one.pid) == one.pid)
        return [child.pid for child in helper.children()]

    def done(self) -> Done:
        """Wait for its end, and look for what it left behind."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(SECONDS)
        seconds = time.monotonic() - self.began
        self._listener.join(SECONDS)
        return Done(code, out, "".join(self.lines), seconds, left_behind(self.mark))

    def closed(self) -> None:
        """Close its streams, unless something that it left behind still writes into them."""
        self._listener.join(10.0)
        if not self._listener.is_alive():
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time."""
        gone = os.pidfd_open(self.process.pid)
        try:
            return bool(select.select([gone], [], [], seconds)[0])
        finally:
            os.close(gone)

    def kill_group(self) -> list[int]:
        """`kill -9` of the launcher's whole group; returns who of its family is still there some seconds later."""
        watched = {child.pid: os.pidfd_open(child.pid) for child in self.family()}
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        try:
            return [pid for pid, fd in watched.items() if not select.select([fd], [], [], 10.0)[0]]
        finally:
            for fd in watched.values():
                os.close(fd)


@contextlib.contextmanager
def started(
    cwd: Path,
    *argv: str,
    program: Sequence[str] | None = None,
    environ: dict[str, str] | None = None,
    module: str = "unisono",
) -> Iterator[Job]:
    """A command under way; whatever the test does, it is gone at the end. Where no program is given, it is a module,
    forked from a process that has torch imported; UNISONO is the command as a user starts it."""
    mark = secrets.token_hex(8)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UNISONO_", "SLURM_", "OMPI_", "PMI_"))}
    kept |= environ or {}
    process: Forked | subprocess.Popen[str]
    if program is None:
        process = Forked(["-m", module, *argv], cwd, kept, mark)
    else:
        process = subprocess.Popen(
            [*program, *argv],
            cwd=cwd,
            env={**kept, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    job = Job(process, cwd, mark)
    try:
        yield job
    finally:
        process.kill()
        process.wait()
        job.closed()


def unisono(
    cwd: Path,
    *argv: str,
    program: Sequence[str] | None = None,
    environ: dict[str, str] | None = None,
    module: str = "unisono",
) -> Done:
    """A command from start to end."""
    with started(cwd, *argv, program=program, environ=environ, module=module) as job:
        return job.done()


def marked(mark: str) -> list[int]:
    """Processes that carry `mark`. A dying one has no environment any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def left_behind(mark: str) -> tuple[int, ...]:
    """Processes that carry `mark` and do not leave within ten seconds."""
    stayed = []
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            if not select.select([fd], [], [], 10.0)[0]:
                stayed.append(pid)
            os.close(fd)
    return tuple(stayed)


def runs_of(cwd: Path) -> list[Path]:
    """Run folders below the working folder's `runs`, oldest first."""
    return sorted(path.parent for path in (cwd / "runs").glob("*/*/config.resolved.toml"))


def lines(run: Path) -> int:
    """How many steps metrics.jsonl has, counted without reading their numbers: who waits asks every few milliseconds."""
    try:
        text = (run / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return 0
    return text.count(b'"loss"', 0, text.rfind(b"\n") + 1)


def losses(run: Path) -> dict[int, float]:
    """step -> loss as metrics.jsonl has them, to the last bit; a line still being written is left out."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return {}
    lines = text[: text.rfind("\n") + 1].splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, filter(None, lines))}


def checkpoints(run: Path) -> list[str]:
    """Checkpoints that are in force, oldest first: up to the one that `latest` names. What a kill cut short is none."""
    latest = (run / "latest").read_text().strip().rpartition("/")[2]
    names = (path.name for path in (run / "checkpoints").glob("step-*"))
    return sorted(name for name in names if "." not in name and name <= latest)


def error_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "error.json").read_text())


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own, in memory. For tests marked `root`."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)

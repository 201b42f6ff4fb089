"""Where a rank stands: the line its main thread is in, and whether it waits there for other ranks. No torch.

What is known of a rank comes from itself, while it can still speak, or from outside: the kernel knows that it is
stopped, and faulthandler writes its lines even while Python is held up.
"""

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from unisono.spec.doubtful import plain
from unisono.spec.frames import is_foreign

FORM = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How what ranks write for others is read back; see `inspect_schema`."""
Text = Annotated[str, AfterValidator(lambda text: plain(text, 4000))]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
Seconds = Annotated[float, Field(ge=0)]

ASK = signal.SIGRTMIN + 6
"""The signal at which faulthandler writes a rank's lines into its memory file."""
LINES = "unisono-lines"
"""The name of that file."""
PRINT = signal.SIGRTMIN + 7
"""The signal at which it prints the main thread's. SIGUSR1 is a scheduler's, and asks for an end."""
_HEAD = "(most recent call first):"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_OUTERMOST = (" in <module>", " in _run_module_as_main", "...")  # faulthandler shows a hundred lines
_PACKAGE = str(Path(__file__).parents[1])
_BETWEEN = ("torch/_ops.py", "torch/_library/", "torch/utils/_contextlib.py", "/threading.py")  # they hand on
_WAITS = ("torch/distributed/", "unisono/comm/", "launch/agree.py", "launch/rank/store.py", "launch/wire.py")
_LAST = ("library/leave.py", "launch/rank/channel.py", "launch/context.py")
# What a house file is about; the innermost that is found names what a rank is in. Less usual things weigh more: where
# two ranks differ and no majority says who is right, the one that does the less usual thing is the odd one.
_PARTS = (
    ("train/state/checkpoint/", "saving", 2),
    ("train/step/evaluate.py", "validation", 1),
    ("train/step/grad_norm.py", "the clipping norm", 1),
    ("launch/agree.py", "the agreement of ranks at the start", 1),
    ("library/batch_sharding.py", "the next batch", 0),
    ("train/step/gradients.py", "the exchange of gradients", 0),
    ("fsdp/", "the exchange of weights or gradients", 0),
    ("parallel/post.py", "the pipeline's messages", 0),
    ("comm/mesh.py", "the making of groups", 0),
    ("library/enter.py", "the meeting of ranks", 0),
    ("train/build/build.py", "the meeting of ranks", 0),
    ("train/step/train_step.py", "a step", 0),
)
_JOB: dict[str, int] = {
    **dict.fromkeys(("clip", "mean", "log", "weigh", "weights", "prepare"), 1),
    "save": 2,
    "load": 2,
    "close": 3,
}


class Frame(NamedTuple):
    file: Text
    line: Count
    name: Text

    def place(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class RankStatus:
    """state: "runs", "waits" for other ranks, "ended" (waits for them at its end), "stopped" by a signal, "silent" (it
    does not answer) or "gone"; a judge adds "called" and "clashed". part: what it is in, as a user names it. op: the
    collective. place: the innermost line of the user's, else of ours. odd: how unusual the part is. idle: seconds for
    which it has not moved. step: steps made."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    rank: Rank
    state: Literal["runs", "waits", "ended", "stopped", "silent", "gone", "called", "clashed"]
    host: Text = ""
    part: Text = ""
    op: Text = ""
    place: Text = ""
    odd: int = 0
    idle: Seconds = 0.0
    step: Count = 0

    def doing(self) -> str:
        """What it is in, for a sentence: "job.clip (all_reduce over dp)"."""
        if self.part and self.op and self.op != self.part:
            return f"{self.part} ({self.op})"
        return self.part or self.op


def status_of(
    rank: int, frames: Sequence[Frame], op: str = "", pending: bool = False, program: str = "", **known: Any
) -> RankStatus:
    """What the frames of a rank's main thread say, innermost first. op: the collective, if it is known better than by
    name. pending: whether torch knows of a collective of this rank that is not over. program: its main file."""
    tail: list[Frame] = []
    for frame in frames:
        if _is_users(frame):
            break
        tail.append(frame)
    waits = _waits(tail) or (pending and not tail and "wait(" in _source(frames[:1]))
    part, odd = _part(tail)
    ended = waits and any(file in frame.file for frame in frames for file in _LAST)
    if ended:
        part, odd = "the end of its program", 3
    users = next((frame for frame in frames if _is_users(frame)), None)
    place = users.place() if users else next((f.place() for f in tail if _PACKAGE in f.file), "")
    if ended and users is None and program:
        place = f"{program}, at its end"
    op = op or (next((f.name for f in tail if "distributed_c10d" in f.file), "") if waits else "")
    state = "ended" if ended else "waits" if waits else "runs"
    return RankStatus(rank, state, part=part, op=op, place=place, odd=odd, **known)


def _is_users(frame: Frame) -> bool:
    return not is_foreign(frame.file) and not frame.file.startswith("<")


def _waits(tail: Sequence[Frame]) -> bool:
    inner = next((f for f in tail if not any(file in f.file for file in _BETWEEN)), None)
    if inner is None:
        return False
    if any(part in inner.file for part in (*_WAITS, *_LAST)) or inner.name == "polls":
        return True
    return inner.file.startswith(_PACKAGE) and "wait()" in _source([inner])


def _source(frames: Sequence[Frame]) -> str:
    return linecache.getline(frames[0].file, frames[0].line) if frames else ""


def _part(tail: Sequence[Frame]) -> tuple[str, int]:
    for frame in reversed(tail):
        if frame.file.endswith("library/job.py") and frame.name in _JOB:
            return f"job.{frame.name}", _JOB[frame.name]
    for frame in tail:
        for file, part, odd in _PARTS:
            if file in frame.file:
                return part, odd
    direct = next((f.name for f in tail if "distributed_c10d" in f.file), "")
    return (direct, 1) if direct else ("", 0)


def from_dump(rank: int, lines: Iterable[str], main: int = 0, **known: Any) -> RankStatus:
    """Return the status that faulthandler's lines show; "silent" if there are none. main: see `frames_of`."""
    frames = frames_of(lines, main)
    return status_of(rank, frames, **known) if frames else RankStatus(rank, "silent", **known)


def frames_of(lines: Iterable[str], main: int = 0) -> list[Frame]:
    """Return the frames of one thread that faulthandler wrote, innermost first. main: the number of that thread, if
    several were written; without it, the current thread is taken, or else the last."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in lines:
        if _HEAD in line:
            threads.append((line, []))
        elif threads and (match := _FRAME.search(line)):
            threads[-1][1].append(Frame(match["file"], int(match["line"]), match["name"]))
    written = [(head, frames) for head, frames in threads if frames]
    meant = [thread for thread in written if main and f"{main:#018x}" in thread[0]]
    meant = meant or [thread for thread in written if thread[0].startswith("Current")] or written
    return meant[-1][1] if meant else []


def catch_lines() -> int:
    """From now on this process writes the lines of all its threads where others can read them, when it gets the signal
    `ASK`. Returns the descriptor of that file; -1 where the system has none in memory."""
    file = os.memfd_create(LINES) if hasattr(os, "memfd_create") else -1
    if file >= 0:
        faulthandler.register(ASK, file=file, all_threads=True)
    return file


def from_outside(
    rank: int, pid: int, main: int, file: int, host: str, frames: list[Frame] | None = None
) -> RankStatus:
    """A rank of this host that does not answer: what the kernel and faulthandler say. A stopped one goes on for the
    milliseconds that its lines take; one that a debugger holds is left alone. main: its main thread. file: its memory
    file's descriptor. frames: where the lines of that thread are to go."""
    state = process_state(pid)
    if state in ("", "Z", "X"):
        return RankStatus(rank, "gone", host)
    seen = RankStatus(rank, "silent", host)
    if state != "t" and catches(pid, ASK):
        with suppress(OSError):
            lines = _dump(pid, file, main, state == "T")
            seen = from_dump(rank, lines, main, host=host)
            if frames is not None:
                frames += frames_of(lines, main)
    if state in "Tt":
        return RankStatus(rank, "stopped", host, seen.part, seen.op, seen.place)
    return seen


def _dump(pid: int, file: int, main: int, stopped: bool) -> list[str]:
    """What faulthandler writes of a process now. Raises OSError."""
    path, lines = Path(f"/proc/{pid}/fd/{file}"), list[str]()
    if not os.readlink(path).startswith(f"/memfd:{LINES}"):  # who said that it is a rank may be anybody
        raise PermissionError(f"process {pid} is no rank")
    with path.open("rb") as dump:
        before = dump.seek(0, os.SEEK_END)
        os.kill(pid, ASK)
        if stopped:
            os.kill(pid, signal.SIGCONT)
        try:
            until = time.monotonic() + 0.5
            while not _is_whole(lines, main) and time.monotonic() < until:
                time.sleep(0.002)
                dump.seek(before)
                lines = dump.read().decode(errors="replace").splitlines()
        finally:
            if stopped:
                os.kill(pid, signal.SIGSTOP)
    return lines


def _is_whole(lines: Sequence[str], main: int) -> bool:
    """Whether a dump has come to the outermost line of the thread that is meant."""
    at = next((n for n, line in enumerate(lines) if _HEAD in line and f"{main:#018x}" in line), len(lines))
    return any(line.rstrip().endswith(_OUTERMOST) for line in lines[at:])


def catches(pid: int, number: int) -> bool:
    """Whether a process of this user's acts on a signal, so that it is not ended by it."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid() and os.geteuid():
            return False
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(int(row.split()[1], 16) for row in rows if row.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(mask >> (number - 1) & 1)


def process_state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T (stopped), Z; "" where there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def ran(thread: int) -> str:
    """How long and how often a thread of this process has run, as the kernel writes it: while it waits, that stays."""
    for file in ("schedstat", "status"):
        with suppress(OSError):
            return Path(f"/proc/self/task/{thread}/{file}").read_text()
    return ""

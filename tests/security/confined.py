"""Hostile inputs, each played where it can harm nobody: so many bytes, so many seconds, and somebody who listens.

An input follows from its kind, a seed and its number, so that any of them can be had again. Right is an error of the
house, or a value. A child plays many of them one after the other; where it dies or stands still, the next child goes on
behind the input that did it.
"""

import contextlib
import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.spec.doubtful import visible
from unisono.spec.errors import UnisonoError
from unisono.spec.frames import known

ROOM = 1 << 30  # bytes that an input may take beside what the process has
CPU = 5.0  # seconds of a core that an input may take
STILL = 120.0  # seconds without a word after which a child hangs
EXITS = (1, 2, 3, 4, 5, 6, 75, 77, 130)  # as docs/launch.md has them
CANARY = "canary"
"""The file that comes to be where a payload has run."""
CODE = f"import pathlib; pathlib.Path(r'{{place}}/{CANARY}').write_text('run')\nclass Own: pass\n"
_RAN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pickle.find_class",
        "ctypes.dlopen", "socket.connect", "socket.bind", "os.kill", "os.killpg", "shutil.rmtree", "os.chmod", "os.putenv")  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Kind:
    """One kind of input. draw(order): one of them. play(given): what became of it, in a word; errors of the house pass
    through. ready(): once in each child, before anybody listens: what is imported, and files in the working folder.
    share: how many of a hundred inputs are of it. allows: what it does itself that nobody else may."""

    name: str
    draw: Callable[[random.Random], Any]
    play: Callable[[Any], str]
    ready: Callable[[], Any] = lambda: None
    share: float = 1.0
    allows: tuple[str, ...] = ()


@dataclass
class Tally:
    """What became of the inputs of one kind. wrong: what must never be, in words. slowest: seconds of a core."""

    name: str
    tried: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def line(self, most: int = 5) -> str:
        seen = ", ".join(f"{count} {what}" for what, count in self.seen.most_common(most))
        rest = sum(self.seen.values()) - sum(count for _, count in self.seen.most_common(most))
        more = f", {rest} others" if rest else ""
        head = (
            f"{self.name:<14} {self.tried:>7} tried {len(self.wrong):>3} wrong  slowest {self.slowest:5.2f} s"
        )
        return f"{head}   {seen}{more}"


def played(kind: Kind, numbers: range, seed: int = 0, most_wrong: int = 50) -> Tally:
    """Play these inputs of a kind."""
    tally, first = Tally(kind.name), numbers.start
    while first < numbers.stop and len(tally.wrong) < most_wrong:
        first = _child_plays(kind, range(first, numbers.stop), seed, tally)
    return tally


def given(kind: Kind, number: int, seed: int = 0) -> Any:
    """The input of that number."""
    return kind.draw(random.Random(f"{seed}/{kind.name}/{number}"))


def _child_plays(kind: Kind, numbers: range, seed: int, tally: Tally) -> int:
    """Play inputs in a child as far as it comes; the number of the next one."""
    at = mmap.mmap(-1, 8)
    at[:] = numbers.start.to_bytes(8, "little")
    ours, theirs = os.pipe()
    place = Path(tempfile.mkdtemp(prefix="confined-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        with contextlib.suppress(BaseException):
            _live(kind, numbers, seed, place, at, theirs)
        os._exit(1)
    os.close(theirs)
    why = _hear(ours, tally)
    if why:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    shutil.rmtree(place, ignore_errors=True)
    if status == 0:
        return numbers.stop
    number = int.from_bytes(at[:], "little")
    tally.tried += 1
    what = why or (f"the process died of signal {-status}" if status < 0 else "the process ended")
    tally.wrong.append(f"{kind.name} {number}: {what}: {_shown(given(kind, number, seed))}")
    return number + 1


def _hear(pipe: int, tally: Tally) -> str:
    """Take in what a child tells; why it must be killed, "" where it has ended."""
    rest = b""
    with os.fdopen(pipe, "rb", buffering=0) as told:
        while select.select([told], [], [], STILL)[0]:
            data = told.read(1 << 16)
            if not data:
                return ""
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                tally.tried += 1
                tally.seen[said["became"]] += 1
                tally.slowest = max(tally.slowest, said["cpu"])
                tally.wrong += said["wrong"]
    return f"it hangs: no word for {STILL:.0f} s"


# In the child.


def _live(kind: Kind, numbers: range, seed: int, place: Path, at: mmap.mmap, told: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.chdir(place)
    (place / "canary.py").write_text(CODE.format(place=place))
    kind.ready()
    heard: list[str] = []
    with _listened(place, heard, kind.allows) as listening:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))
        for number in numbers:
            at[:] = number.to_bytes(8, "little")
            one = given(kind, number, seed)
            heard.clear()
            began = time.process_time()
            with listening():
                became, wrong = _became(kind, one)
            took = time.process_time() - began
            wrong += [f"it did {what}" for what in dict.fromkeys(heard)]
            if (place / CANARY).exists():
                (place / CANARY).unlink()
                wrong.append("CODE WAS RUN")
            said = [f"{kind.name} {number}: {what}: {_shown(one)}" for what in wrong]
            line = json.dumps({"became": became, "cpu": took, "wrong": said})
            os.write(told, line.encode() + b"\n")
    os._exit(0)


def _became(kind: Kind, one: Any) -> tuple[str, list[str]]:
    """What became of an input, and what is wrong with that."""
    signal.signal(signal.SIGPROF, _too_long)
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU)
        became = kind.play(one)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return became, []
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return _judged(error)


def _judged(error: BaseException) -> tuple[str, list[str]]:
    """An error as the command line would tell it; one that it has no word for is wrong."""
    if isinstance(error, _TooLong):
        return "too slow", [f"it takes more than {CPU:.0f} s of a core at {_place(error)}"]
    if isinstance(error, MemoryError):
        return "no memory", [f"it takes more than {ROOM >> 20} MiB at {_place(error)}"]
    own = error.__traceback__
    while own is not None and "/tests/security/" in own.tb_frame.f_code.co_filename:
        own = own.tb_next  # our own lines would be a user's
    told = known(error.with_traceback(own))
    if not isinstance(error, UnisonoError) and told.code not in ("E02",):
        return "crash", [f"{type(error).__name__}: {str(error)[:200]!a} at {_place(error)}"]
    wrong = []
    if told.exit not in EXITS:
        wrong.append(f"exit code {told.exit}")
    text = told.render()
    try:
        text.encode()
        json.dumps(told.as_dict()).encode()
    except (UnicodeError, ValueError) as unsaid:
        wrong.append(f"its error cannot be said: {unsaid!a}")
    if visible(text) != text:
        wrong.append(f"its error steers a terminal: {text[:200]!a}")
    if len(text) > 300_000:
        wrong.append(f"its error has {len(text)} letters")
    return f"U-{told.code}", wrong


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/unisono/" in f.filename] or frames
    return f"{own[-1].filename.rpartition('/src/')[2]}:{own[-1].lineno}" if own else "?"


class _TooLong(BaseException):
    """More than its share of a core."""


def _too_long(*_: object) -> None:
    raise _TooLong


@contextlib.contextmanager
def _listened(place: Path, heard: list[str], allows: tuple[str, ...]) -> Iterator[Callable[[], Any]]:
    """Hear what is done while `listening()` lasts: programs and sockets, and files written outside of `place`."""
    on = [False]

    def hear(event: str, said: tuple[Any, ...]) -> None:
        if not on[0]:
            return
        if event in _RAN and event not in allows:
            heard.append(f"{event} {str(said)[:100]!a}")
        elif (
            event == "open"
            and isinstance(said[2], int)
            and said[2] & _WRITES
            and isinstance(said[0], str | bytes)
        ):
            path = os.fsdecode(said[0])
            if not os.path.realpath(path).startswith((str(place), os.devnull)):
                heard.append(f"open {path!a} to write")

    @contextlib.contextmanager
    def listening() -> Iterator[None]:
        on[0] = True
        try:
            yield
        finally:
            on[0] = False

    sys.addaudithook(hear)
    yield listening


def _shown(one: Any) -> str:
    text = ascii(one)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} letters)"

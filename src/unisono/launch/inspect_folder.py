"""Ranks that are alive, as a folder tells it: who they are, and a question that is answered for each of them. No torch.

`rankN.json` says who a rank is, and is taken away when it ends. A question is a few letters in `ask`, which whoever
answers reads once a second; the answer is in `rankN.says`. The supervisor answers for its ranks (`inspect_server`);
under torchrun, Slurm and MPI, and in the library way, each rank does so itself (`rank.presence`). So no port is open,
and it works over any file system that the asker's host shares with who answers. Both files are written in place: a
network file system looks anew at a file that is opened, but for seconds not at a name that was not there.
"""

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unisono.launch.inspect_schema import RankReport, read_report
from unisono.launch.rank_status import (
    FORM,
    Count,
    Frame,
    Rank,
    RankStatus,
    Text,
    from_outside,
    process_state,
)
from unisono.observe.files import lock_now, write_all, write_whole
from unisono.spec.doubtful import read_regular

ALIVE = "alive"
"""The folder in a run's."""
TMP = Path("/tmp")  # TMPDIR may be another in a job than in the terminal of who asks
SLOW = 1.5
"""Seconds after which a rank that has not answered is looked at by others of its host."""
_QUESTION = 256  # bytes, always written at once
_MOST = 4 << 20  # bytes of an answer


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank. start: when it began, in ticks of the kernel, since numbers of processes come again.
    home: as `home` returns it. main: the number of its main thread. lines: the descriptor of the file that faulthandler
    writes into. run: the same for all ranks of one start. began: seconds since 1970. private: whether each host has a
    folder of its own."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    rank: Rank
    world: Annotated[int, Field(ge=1, le=1 << 20)]
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    start: Count
    host: Text
    home: list[Any]
    main: Annotated[int, Field(ge=0, lt=1 << 64)]
    lines: Annotated[int, Field(ge=-1, lt=1 << 31)]
    run: Text
    began: float
    private: bool = False

    @staticmethod
    def of(content: Mapping[str, Any]) -> "RankProcess | None":
        """The process that a file or an event describes; None if that is in another form."""
        with suppress(ValidationError, RecursionError):
            return _PROCESS.validate_json(json.dumps(content))  # strictly, it takes no dict
        return None

    def is_here(self) -> bool:
        """Whether its process can be seen from this one."""
        return self.home == home()

    def has_gone(self) -> bool:
        """Whether it is seen to have ended; of another host's, nothing is."""
        return self.is_here() and (
            started(self.pid) != self.start or process_state(self.pid) in ("", "Z", "X")
        )


@dataclass(frozen=True)
class InspectQuestion:
    """token: new each time. home: of who asks."""

    token: str
    home: list[Any]


_PROCESS = TypeAdapter(RankProcess)


def home() -> list[Any]:
    """What two processes share that see each other's numbers: the machine's start and the name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, Path("/proc/self/ns/pid").stat().st_ino]
    except OSError:
        return [os.getpid()]


def started(pid: int) -> int:
    """When a process began, in ticks of the kernel; 0 where there is none."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def this_process(
    rank: int, world: int, host: str, lines: int, run: str = "", private: bool = False
) -> RankProcess:
    """Describe this process, which is a rank. run: the secret of this start."""
    pid, main = os.getpid(), threading.main_thread().ident or 0
    return RankProcess(
        rank, world, pid, started(pid), host, home(), main, lines, of_start(run), time.time(), private
    )  # fmt: skip


def private_folder() -> Path:
    """Where runs without a folder of their own are seen, on each host by itself: a folder of this user's alone. Raises
    OSError where somebody else has taken it."""
    folder = TMP / f"unisono-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    seen = folder.lstat()
    if folder.is_symlink() or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def private(token: str) -> Path:
    """The folder of one start of such a run, rid of what ended runs have left beside it. Raises OSError."""
    for left in private_folder().iterdir():
        sweep(left)
    return private_folder() / of_start(token)


def private_runs() -> list[Path]:
    """Runs of this host that have no folder of their own and are alive."""
    with suppress(OSError):
        folders = sorted(path for path in private_folder().iterdir() if path.is_dir())
        return [path for path in folders if any(not process.has_gone() for process in living(path))]
    return []


def of_start(token: str) -> str:
    """The name of one start of a run; nobody can tell the token from it."""
    return hashlib.sha256(f"alive {token}".encode()).hexdigest()[:12]


# What a rank writes.


def appear(folder: Path, me: RankProcess) -> None:
    """Put this rank down. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(folder / "ask", os.O_RDWR | os.O_CREAT, 0o600))
    _write(_says(folder, me.rank), {})
    write_whole(_who(folder, me.rank), json.dumps(asdict(me)))


def leave(folder: Path, me: RankProcess) -> None:
    """Take this rank away again, unless another process has taken its place."""
    with suppress(OSError):
        if _read(_who(folder, me.rank)).get("pid") == me.pid:
            _who(folder, me.rank).unlink()
            _says(folder, me.rank).unlink(missing_ok=True)
            _close(folder)


def sweep(folder: Path) -> None:
    """Take away what is left of processes that have ended, or are this one."""
    for process in _all(folder):
        if process.has_gone() or (process.is_here() and process.pid == os.getpid()):
            leave(folder, process)


def _close(folder: Path) -> None:
    if not any(folder.glob("rank*")):
        (folder / "ask").unlink(missing_ok=True)
        folder.rmdir()


def question(folder: Path) -> InspectQuestion | None:
    """What was asked last."""
    content = _read(folder / "ask")
    token, asker = content.get("token"), content.get("home")
    return InspectQuestion(token, asker) if isinstance(token, str) and isinstance(asker, list) else None


class Questions:
    """What is asked in a folder, for who answers there. rest: seconds between two looks."""

    def __init__(self, folder: Path, rest: float = 1.0) -> None:
        self._folder, self._rest = folder, rest
        self._heard, self._due = question(folder), float("inf")

    def wait(self) -> float:
        """Seconds until the next look."""
        return self._rest if self._due == float("inf") else 0.1

    def look(self) -> tuple[InspectQuestion, bool] | None:
        """A question that is new; once more, with True, when those that have not answered it are to be looked at."""
        latest = question(self._folder)
        if latest is not None and latest != self._heard:
            self._heard, self._due = latest, time.monotonic() + SLOW
            return latest, False
        if latest is not None and time.monotonic() > self._due:
            self._due = float("inf")
            return latest, True
        return None


def answer(folder: Path, rank: int, token: str, facts: Mapping[str, Any]) -> None:
    """Say something for a rank. Raises OSError."""
    _write(_says(folder, rank), {"token": token, **facts})


# What somebody else reads.


def living(folder: Path) -> list[RankProcess]:
    """The ranks that were put down at the last start, by number; some of them may have gone."""
    processes = _all(folder)
    last = max(processes, key=lambda process: process.began, default=None)
    return sorted(
        (process for process in processes if last and process.run == last.run),
        key=lambda process: process.rank,
    )


@contextmanager
def asking(folder: Path, patience: float = 20.0) -> Iterator[str]:
    """Ask all ranks, and hear what `answer_of` has for the token that is given. One asks at a time. Raises OSError."""
    file = os.open(folder / "ask", os.O_RDWR)
    try:
        until = time.monotonic() + patience
        while not lock_now(file) and time.monotonic() < until:
            time.sleep(0.05)
        token = secrets.token_hex(8)
        os.pwrite(file, json.dumps({"token": token, "home": home()}).encode().ljust(_QUESTION), 0)
        os.fsync(file)
        yield token
    finally:
        os.close(file)


def answer_of(folder: Path, rank: int, token: str) -> dict[str, Any] | None:
    """What a rank has answered; None if it has not yet, or in no form of ours."""
    content = _read(_says(folder, rank))
    is_answer = content.get("token") == token and ("failed" in content or read_report(content))
    return content if is_answer else None


def seen(process: RankProcess) -> RankReport:
    """What another process of its host can say of a rank that does not answer. It changes nothing in it; one that is
    stopped goes on for the milliseconds that its lines take."""
    frames = list[Frame]()
    status = RankStatus(process.rank, "gone", process.host)
    if not process.has_gone():
        status = from_outside(process.rank, process.pid, process.main, process.lines, process.host, frames)
    return RankReport(status, frames, kernel=kernel(process.pid))


_WORDS = {"R": "running", "S": "sleeping", "D": "waiting inside the kernel", "T": "stopped", "t": "traced"}


def kernel(pid: int) -> dict[Literal["state", "in", "tracer"], str | int]:
    """What the kernel says of a process's main thread: its state in a word, where it sleeps, who traces it."""
    state = process_state(pid)
    seen: dict[Literal["state", "in", "tracer"], str | int] = {
        "state": _WORDS.get(state, "zombie" if state else "gone"),
        "in": "",
        "tracer": 0,
    }
    with suppress(OSError, StopIteration, ValueError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
        seen["in"] = "" if where == "0" else where
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        seen["tracer"] = next(int(row.split()[1]) for row in rows if row.startswith("TracerPid:"))
    return seen


def _all(folder: Path) -> list[RankProcess]:
    # What is in another form is of another version, or was made by hand.
    processes = (RankProcess.of(_read(path)) for path in folder.glob("rank*.json"))
    return [process for process in processes if process is not None]


def _who(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _says(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.says"


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; nothing where there is none, or it is being written."""
    try:
        content = json.loads(read_regular(path, _MOST) or b"")
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(fd, json.dumps(value).encode())
    finally:
        os.close(fd)

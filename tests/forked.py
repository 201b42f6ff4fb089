"""Pythons that need not import torch: `Forked(["-m", "unisono", "train"], cwd, environ)` is forked from a process that did.

To a test it is what `subprocess.Popen` gives: a process of its own, in its own session, with its own streams, whose
helper (see `unisono.launch.local_host`) is forked in the same way. What it does not have is a Python's start: where the
import, signals before the first line or the exit are the point, a test starts a real one.

`python -m tests.forked FD` is the process that forks; it has one thread and ends when FD, a socket, is closed.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

MARK = "UNISONO__TEST"  # a name that the product never reads; children inherit it
BLANK = "0" * 16


class Forked:
    """A Python at work: argv as after `python`.

    mark: 16 letters that stand as MARK in the environment of it and of all that it starts. fds: it has these open too,
    under the same numbers. streams: what its stdout and stderr are; pipes where they are absent.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        mark: str = BLANK,
        *,
        fds: Sequence[int] = (),
        streams: tuple[int, int] | None = None,
    ) -> None:
        self._status, theirs = socket.socketpair()
        order = {"argv": list(argv), "cwd": str(cwd), "environ": {**environ, MARK: mark}, "mark": mark}
        payload = json.dumps({**order, "fds": list(fds)}).encode()
        (out, out_end), (err, err_end) = (os.pipe(), os.pipe()) if streams is None else ((0, 0), (0, 0))
        with theirs:
            head = len(payload).to_bytes(8, "big")
            sent = [theirs.fileno(), *(streams or (out_end, err_end)), *fds]
            socket.send_fds(_server()[0], [head], sent)
            _server()[0].sendall(payload)
        if streams is None:
            os.close(out_end)
            os.close(err_end)
            self.stdout: IO[str] = os.fdopen(out, encoding="utf-8")
            self.stderr: IO[str] = os.fdopen(err, encoding="utf-8")
        self.pid = self._told()
        self.returncode: int | None = None

    def _told(self) -> int:
        words = self._status.recv(8)
        assert words, "the process that forks has gone"
        return int.from_bytes(words, "big", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or the signal's number below 0, once it has ended."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            self.returncode = self._told()
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def helper(argv: list[str], *, env: dict[str, str], pass_fds: list[int], **_: Any) -> Forked:
    """In the place of `subprocess.Popen`: the process of a ForkServer that is made in this process."""
    terms = {**json.loads(argv[-1]), "parent": _server()[1]}  # with whom it dies, and who dies with us
    return Forked([*argv[1:-1], json.dumps(terms)], Path.cwd(), env, fds=pass_fds, streams=(2, 2))


@cache
def _server() -> tuple[socket.socket, int]:
    """The line to the process that forks, one for this process, and its number; it ends with us."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                MARK: BLANK,
                "OPENBLAS_NUM_THREADS": "1",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours, process.pid


class _Child:
    """What ForkServer knows of its process: as `subprocess.Popen`, but forked."""

    def __init__(self, argv: list[str], *, env: dict[str, str], pass_fds: list[int], **_: Any) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        os.dup2(2, 1)
        _close_all_but({0, 1, 2, *pass_fds})
        _be(argv[1:], env)

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def _be(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """`python -m MODULE ...`, `python -P -m MODULE ...` or `python SCRIPT ...` in this process, which is new."""
    code = 1
    atexit._clear()  # what the process that forks has to do at its end
    try:
        sys.path[0] = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).parent)
        if argv[0] == "-P":
            del sys.path[0]
        places = environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [place for place in places if place and place not in sys.path]
        os.environ.clear()
        os.environ.update(environ)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module, words = argv[0].startswith("-"), list(argv)
        if module:
            words = words[words.index("-m") + 1 :]
        sys.argv = words
        try:
            if module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(*sys.exc_info())
    with suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with suppress(OSError):
                os.close(fd)


def preload() -> None:
    """Imports what ranks of tests need, once before they are forked: in each of them it would take half a second."""
    import torch

    modules = (
        "cli",
        "launch.rank.main",
        "verbs.train.rank",
        "verbs.train.run",
        "verify.prover_rank",
    )
    for module in modules:
        importlib.import_module(f"unisono.{module}")
    for room in ("comm.collectives", "models.gpt", "sync"):  # what most ranks import once they run
        package = importlib.import_module(f"unisono.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):
                importlib.import_module(found.name)
    from unisono_contrib.verify.conformance import families

    for family in families():
        for name in family.names():
            family.find(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # who is forked shares these pages; a collection would write to all of them
    gc.unfreeze = lambda: None  # type: ignore[assignment]  # what is inherited stays set aside in who forks in turn


def serve(line: socket.socket) -> None:
    """Forks what is asked for, tells its number, and how it ends."""
    import unisono.launch.local_host

    preload()
    unisono.launch.local_host.subprocess = SimpleNamespace(Popen=_Child, DEVNULL=subprocess.DEVNULL)  # type: ignore
    place = ctypes.CDLL(None).getenv
    place.restype = ctypes.c_void_p
    marked = place(MARK.encode())
    alive: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd in select.select([line, *alive], [], [])[0]:
            if fd in alive:
                pid, status = alive.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError), status:
                    status.sendall(code.to_bytes(8, "big", signed=True))
                os.close(fd)
                continue
            head, fds, _, _ = socket.recv_fds(line, 8, 16)
            if not head:
                return
            text = line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                _begin(json.loads(text), fds, marked)
            status = socket.socket(fileno=fds[0])
            status.sendall(pid.to_bytes(8, "big", signed=True))
            for fd in fds[1:]:
                os.close(fd)
            alive[os.pidfd_open(pid)] = (pid, status)


def _begin(order: dict[str, Any], fds: list[int], marked: int) -> NoReturn:
    os.setsid()
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds[1:]]  # out of the way of the numbers wanted
    _close_all_but({0, *kept})
    for fd, number in zip(kept, [1, 2, *order["fds"]], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    ctypes.memmove(marked, order["mark"].encode(), len(BLANK))  # where /proc/PID/environ shows it
    _be(order["argv"], order["environ"])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

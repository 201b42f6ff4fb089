"""A fork server that is forked from this very process, so that ranks know what has been defined in it. No torch.

A notebook's function stands in no file that a new Python could import. A child of the notebook's process has it.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from unisono.launch.fork_server_main import ForkServerProcess
from unisono.launch.local_host import LocalHost, cores
from unisono.launch.parent import set_parent_death_signal
from unisono.launch.signals import TO_RANKS

_TASKS = Path("/proc/self/task")
_KERNEL = "ZMQbg/"  # threads of a notebook's kernel


class ChildProcess:
    """A forked child as `subprocess.Popen` shows one: pid, `kill`, `wait`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, or the signal's number below 0, once it has ended."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def start_here(entry: Callable[..., Any]) -> LocalHost:
    """This host, whose fork server is a child of this process. entry: `function(ctx, argument, shared)` of its ranks.

    The caller has checked that this process can be forked. The child dies with the thread that calls this.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = os.getpid()
    with theirs, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the caller has judged
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(theirs, here, entry)
    return LocalHost(socket.gethostname(), 1, cores(), control, ChildProcess(pid))


def _serve(control: socket.socket, parent: int, entry: Callable[..., Any]) -> NoReturn:
    """In the child: be a fork server, and never come back into the notebook."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        set_parent_death_signal(parent, libc)
        os.setsid()  # a Ctrl-C, or a notebook's interrupt, is the parent's to hear
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, TO_RANKS)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.dup2(2, 1)
        # A notebook's own streams write to its sockets, which are the parent's.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        ForkServerProcess(control, {"entry": ""}, libc, lambda: (SimpleNamespace(), entry)).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def threads_of_libraries() -> list[str]:
    """Names of the threads that neither Python nor a notebook's kernel has started, such as those of OpenMP's pool."""
    known = {str(thread.native_id) for thread in threading.enumerate()} | {str(os.getpid())}
    names = list[str]()
    for task in os.listdir(_TASKS):
        if task not in known:
            with suppress(OSError):  # it has left
                names.append((_TASKS / task / "comm").read_text().strip())
    return sorted(name for name in names if not name.startswith(_KERNEL))

"""More processes of the same script on this host, for one that was started alone. Imports torch: rank side only."""

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from unisono.launch.context import flush_and_leave
from unisono.launch.starters.environment import PlainVariables
from unisono.spec.errors import UsageError
from unisono.spec.settings import tell

_LEAVE = 10.0  # seconds that the others may still take at the end


@dataclass
class ScriptCopies:
    """The other processes of a script. store: in which all meet; it lies in this process."""

    processes: Sequence[subprocess.Popen[bytes]]
    store: Any = field(repr=False)
    _met: threading.Event = field(default_factory=threading.Event)

    def settle(self) -> None:
        """All have met: from now on this process notices by itself that another one has gone."""
        self._met.set()

    def watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """End this process if another one ends before all have met: it would wait for it in vain."""
        code = process.wait()
        if not self._met.is_set():
            tell(
                f"unisono: rank {rank} of this script ended with code {code} before all had met; its words are above"
            )
            flush_and_leave(code if code > 0 else 128 - code if code else 1)

    def leave(self) -> None:
        """Wait until the others have ended, then end those that have not."""
        until = time.monotonic() + _LEAVE
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def start_beside(world: int) -> ScriptCopies:
    """Start the script of this process `world - 1` times more, with the same arguments; this process is rank 0 of them,
    by the same variables that torchrun leaves. The others print errors only, and die with this process.

    Raises UsageError U-J09 where there is no script to start again, as in a notebook.
    """
    command = _command(sys.modules["__main__"])
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
    before = dict(os.environ)
    os.environ.update(_variables(0, world, store.port))
    guarded = [sys.executable, "-P", "-m", "unisono.launch.parent", str(os.getpid()), *command]
    copies = ScriptCopies(
        [
            subprocess.Popen(
                guarded,
                env={**before, **_variables(rank, world, store.port)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is this process's alone
            )
            for rank in range(1, world)
        ],
        store,
    )
    for rank, process in enumerate(copies.processes, 1):
        threading.Thread(target=copies.watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
    atexit.register(copies.leave)
    return copies


def _variables(rank: int, world: int, port: int) -> Mapping[str, str]:
    return {
        **PlainVariables().leaves(0, rank, (world,)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _command(main: Any) -> list[str]:
    """The words that start this process's script again. Raises UsageError U-J09."""
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name:
        words = ["-m", spec.name.removesuffix(".__main__")]
    elif file and Path(file).is_file() and not sys.flags.interactive:
        words = [str(Path(file).absolute())]
    else:
        raise UsageError(
            "this process runs no script that could be started again for the other ranks",
            where="this Python",
            likely="it is a notebook or a prompt",
            fix="put it into a file; or unisono.comm.threads.run, which plays ranks on threads",
            code="J09",
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags(), *words, *sys.argv[1:]]  # type: ignore[attr-defined]

"""The processes of JAX, apart from torch's: JAX starts threads, and ranks are forked from what has none."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from unisono.config import Resolved
from unisono.observe.files import write_whole
from unisono.spec.errors import UserCodeError

_SECONDS = 900.0  # that a plan may take; compilation is most of it
_POLL = 0.05


def start(entry: str, question: Path, resolved: Resolved, out: Path, processes: bool) -> None:
    """Play a plan; its steps lie in `out` when this returns. entry: module of the processes. Raises UserCodeError with
    the last lines of a process that failed, once all others have ended."""
    plan, out = resolved.plan, out.absolute()
    apart = processes and plan.world > 1
    out.mkdir(parents=True, exist_ok=True)
    job = {
        "question": str(question.absolute()), "mesh": [plan.dp, plan.shard, plan.tp], "pp": plan.pp,
        "zero": plan.zero, "schedule": plan.schedule, "micros": resolved.batch.micros, "devices": plan.world,
    }  # fmt: skip
    with _address() if apart else nullcontext("") as address:
        path = write_whole(out / "job.json", json.dumps(job | {"address": address}))
        python = [sys.executable, "-P", "-m", "unisono.launch.parent", str(os.getpid()), sys.executable, "-P"]
        _run([[*python, "-m", entry, str(path), str(n)] for n in range(plan.world if apart else 1)], out)


@contextmanager
def _address() -> Iterator[str]:
    """A free port of this host, held until the coordinator, which shares it, has ended."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _run(commands: list[list[str]], out: Path) -> None:
    logs = [out / f"process-{n}.log" for n in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as file:
                running.append(subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL))
        end = time.monotonic() + _SECONDS
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            if any(process.poll() for process in running):
                break
            time.sleep(_POLL)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    bad = next((n for n, code in enumerate(codes) if code), None)
    if bad is not None:
        lines = logs[bad].read_text(errors="replace").strip().splitlines()
        raise UserCodeError(
            f"JAX's process {bad} failed: {lines[-1] if lines else 'it ended without a word'}"
        )

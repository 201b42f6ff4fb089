"""A thread that samples what a rank takes, and on the first rank of each host what the host has. No torch.

`resources/rank0.jsonl`: {"at": Unix seconds, "step": the last one that ended, "cores": busy by this process, "rss_mib",
"swap_mib", "read_bytes", "written_bytes": since it began}. `resources/host-NAME.jsonl`: what `_host.HostMeter` reads.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.observe.files import lock_now
from unisono.observe.metrics import JsonLines
from unisono.spec.sink import Observer, RunFacts, StepRecord
from unisono_contrib.train.sinks._host import HostMeter

FOLDER = "resources"


class ResourceSampler(Observer):
    """The live sink. The rank that first locks its host's file is the host's; another takes over when that has gone."""

    def __init__(self, run: RunFacts, every: float) -> None:
        self._folder, self._every, self._step = run.run_dir / FOLDER, every, run.step
        self._file = JsonLines(self._folder / f"rank{run.rank}.jsonl")
        self._name = run.host or socket.gethostname()
        self._lock = os.open(
            self._folder / f".{self._name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._meter: HostMeter | None = None
        self._host: JsonLines | None = None
        self._process = ProcessMeter()
        self._end = threading.Event()
        with suppress(OSError):
            self._file.write({"kind": "info", "rank": run.rank, "host": self._name, "pid": os.getpid()})
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)
        self._thread.start()

    def ended(self, step: int, stop: bool) -> None:
        self._step = step

    def observe(self, steps: Sequence[StepRecord]) -> None:
        return None

    def close(self) -> None:
        self._end.set()
        self._thread.join(5.0)
        for file in (self._file, self._host):
            if file is not None:
                file.close()
        if self._meter is not None:
            self._meter.close()
        os.close(self._lock)

    def _run(self) -> None:
        while not self._end.wait(self._every):
            with suppress(OSError):  # a full disk, a file system that is away: the run goes on without
                self._sample()
        with suppress(OSError):
            self._sample()

    def _sample(self) -> None:
        head = {"at": round(time.time(), 3), "step": self._step}
        self._file.write({**head, **self._process.read()})
        if self._host is None and lock_now(self._lock):
            self._meter = HostMeter(self._folder)
            self._host = JsonLines(self._folder / f"host-{self._name}.jsonl")
            self._host.write({"kind": "info", "host": self._name, **self._meter.facts()})
        elif self._host is not None and self._meter is not None:
            self._host.write({**head, **self._meter.read()})


class ProcessMeter:
    """This process since the last reading."""

    def __init__(self) -> None:
        self._cpu, self._at = time.process_time(), time.monotonic()
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Mapping[str, Any]:
        cpu, at = time.process_time(), time.monotonic()
        cores = (cpu - self._cpu) / max(at - self._at, 1e-6)
        self._cpu, self._at = cpu, at
        taken: dict[str, Any] = {"cores": round(cores, 3)}
        with suppress(OSError, ValueError, IndexError):
            taken["rss_mib"] = round(int(_text("/proc/self/statm").split()[1]) * self._page / 2**20, 1)
        with suppress(OSError, ValueError, IndexError):
            status = _text("/proc/self/status")
            taken["swap_mib"] = round(int(status.partition("VmSwap:")[2].split()[0]) / 1024, 1)
        with suppress(OSError, ValueError):
            rows = dict(row.split(": ") for row in _text("/proc/self/io").splitlines())
            taken |= {"read_bytes": int(rows["read_bytes"]), "written_bytes": int(rows["write_bytes"])}
        return taken


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii", errors="replace")

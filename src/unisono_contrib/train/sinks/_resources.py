"""A thread that samples what a rank takes, and on the first rank of each host what the host has. No torch.

`resources/rank0.jsonl`: {"at": Unix seconds, "step": the last one that ended, "cores": busy by this process, "rss_mib",
"swap_mib", "read_bytes", "written_bytes": since it began}. `resources/host-NAME.jsonl`: what `MachineMeter` reads.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.observe.files import lock_now
from unisono.observe.metrics import JsonLines
from unisono.spec.sink import Observer, RunFacts, StepRecord
from unisono_contrib.train.sinks._host import MachineMeter

FOLDER = "resources"
_MOST = 7200  # lines that wait for a disk with room


class ResourceSampler(Observer):
    """The live sink. The rank that first locks its host's file is the host's; another takes over when that has gone.

    What a full disk does not take waits, an hour of it at most, and comes with the next sample or step.
    """

    def __init__(self, run: RunFacts, every: float) -> None:
        folder = run.run_dir / FOLDER
        self._folder, self._every, self._step = folder, every, run.step
        self._name = run.host or socket.gethostname()
        self._file = JsonLines(folder / f"rank{run.rank}.jsonl")
        self._lock = os.open(folder / f".{self._name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._meter: MachineMeter | None = None
        self._host: JsonLines | None = None
        self._process = ProcessMeter()
        facts = {"kind": "info", "rank": run.rank, "host": self._name, "pid": os.getpid()}
        self._waiting = deque[tuple[JsonLines, Mapping[str, Any]]]([(self._file, facts)], maxlen=_MOST)
        self._writing, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)
        self._thread.start()

    def ended(self, step: int, stop: bool) -> None:
        self._step = step

    def observe(self, steps: Sequence[StepRecord]) -> None:
        self._flush()

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
        ends = False
        while not ends:
            ends = self._end.wait(self._every)
            with suppress(OSError):  # the next step tells of it
                self._sample()
                self._flush()

    def _sample(self) -> None:
        head = {"at": round(time.time(), 3), "step": self._step}
        self._waiting.append((self._file, {**head, **self._process.read()}))
        if self._host is None and lock_now(self._lock):
            self._meter = MachineMeter(self._folder)
            self._host = JsonLines(self._folder / f"host-{self._name}.jsonl")
            self._waiting.append((self._host, {"kind": "info", "host": self._name, **self._meter.facts()}))
        elif self._host is not None and self._meter is not None:
            self._waiting.append((self._host, {**head, **self._meter.read()}))

    def _flush(self) -> None:
        """Write what waits. Raises OSError."""
        with self._writing:
            while self._waiting:
                file, line = self._waiting[0]
                file.write(line)
                self._waiting.popleft()


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

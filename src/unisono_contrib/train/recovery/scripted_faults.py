"""A run under faults: each rank does to itself what the script says, at the moment that it says, and writes it down.

A rank knows its own step and phase, so that a fault comes at exactly that moment. To the others a rank that kills
itself looks as one that was killed. What was played stands in chaos.jsonl, so that a new process in a lost rank's
place does not play it again.
"""

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch

from unisono.comm import parting
from unisono.observe.span import Recorder
from unisono.parallel.player import Leaf
from unisono.train.recovery.fault_injection import FaultInjector
from unisono.train.step.run import Run
from unisono_contrib.programs.chaos import counted
from unisono_contrib.programs.chaos.fault import HELPER, PARTS, SUPERVISOR, Fault
from unisono_contrib.programs.chaos.script import Script
from unisono_contrib.programs.chaos.sequel import Sequel
from unisono_contrib.train.recovery.lagging import LaggingSpan, PartLag

_PHASES = {"data": "load", "forward": "forward", "backward": "backward", "comm": "collective", "wait": "collective",
           "optim": "update"}  # fmt: skip
_MAIN = ("hang", "flip")  # only between two lines of the thread that trains
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_script(script: str, run_dir: Path, rank: int) -> FaultInjector:
    """One rank's part of a script's text."""
    return ScriptedFaults(Script.of_text(script), run_dir, rank)


@final
class ScriptedFaults(FaultInjector):
    """One rank's part of a script."""

    def __init__(self, script: Script, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank, self._seed = run_dir, rank, script.digest
        self._sequel = Sequel(run_dir, script.digest)
        lines = self._sequel.lines()
        played = {line["fault"] for line in lines if line["event"] == "injected"}
        self._launch = sum(line["event"] == "script" for line in lines)
        self._open = [(i, f) for i, f in enumerate(script.faults) if f.player() == rank and i not in played]
        self._first = min((line["t"] for line in lines if line["event"] == "met"), default=None)
        self._cut_off = list[socket.socket]()
        self._recorder: _PhaseRecorder | None = None
        self._run: Run | None = None
        self._samples: _SampleLog | None = None
        self._waiting: list[tuple[int, Fault]] = []
        self._timed = False
        self._slowness = _Slowness()

    def recorder(self, rank: int) -> Recorder:
        self._recorder = _PhaseRecorder(rank, self.reached, self._slowness)
        return self._recorder

    def trains(self, run: Run, epoch: int) -> None:
        self._run = run
        self._sequel.add("met", rank=self._rank, epoch=epoch, step=run.step)
        self._first = self._first if self._first is not None else time.monotonic()
        if not self._timed:
            self._timed = True
            for number, fault in self._open:
                if fault.after is not None:
                    _later(self._first + fault.after - time.monotonic(), self._play, number, fault)
        self._samples = _SampleLog(run, self._run_dir, (self._launch, epoch), self._sequel)

    def fetched(self, leaves: Sequence[Leaf]) -> None:
        if self._samples is not None:
            self._samples.add(leaves)

    def pauses(self) -> None:
        if self._samples is not None:
            self._samples.close()
            self._samples = None

    def reached(self, phase: str, epoch: int = 0) -> None:
        step = self._recorder.step if self._recorder is not None else None
        if phase == "recovery":
            self._sequel.add("meets", rank=self._rank, epoch=epoch)
        waiting, self._waiting = self._waiting, []
        for number, fault in waiting:
            self._play(number, fault, phase)
        for number, fault in [pair for pair in self._open if pair[1].due(phase, step)]:
            self._open.remove((number, fault))
            if fault.late:
                _later(fault.late, self._play, number, fault, phase)
            else:
                self._play(number, fault, phase)

    def _play(self, number: int, fault: Fault, phase: str = "") -> None:
        if fault.what in _MAIN and threading.current_thread() is not threading.main_thread():
            self._waiting.append((number, fault))
            return
        step = self._recorder.step if self._recorder is not None else None
        self._sequel.add("injected", fault=number, rank=fault.who, step=step, phase=phase)
        if fault.kind.signal:
            os.kill(_process(fault.who), signal.Signals[fault.kind.signal])
        else:
            getattr(self, f"_{fault.what}")(fault)

    # Faults that are no signal.

    def _pause(self, fault: Fault) -> None:
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)

    def _slow(self, fault: Fault) -> None:
        self._slowness.begin(fault)

    def _lag(self, fault: Fault) -> None:
        if self._recorder is not None:
            self._recorder.lag.begin(
                fault, [] if self._run is None else list(self._run.local.stages.values())
            )

    def _cut(self, fault: Fault) -> None:
        self._cut_off += parting.cut()

    def _flip(self, fault: Fault) -> None:
        if self._run is None:
            return
        drawn = random.Random(self._seed)
        slots = [slot for slot in self._run.local.slots if slot.master.numel()]
        if not slots:
            return
        master = drawn.choice(slots).master.detach()
        bits = master.view(-1).view(_INTEGERS[master.element_size()])
        bits[drawn.randrange(len(bits))] ^= 1 << min(fault.bit, 8 * master.element_size() - 2)

    def _fill(self, fault: Fault) -> None:
        path = self._run_dir / "chaos.fill"
        with suppress(OSError), path.open("wb") as file:  # a full disk is what it is for
            for _ in range(int(fault.mib)):
                file.write(bytes(1 << 20))
        _later(fault.seconds, path.unlink, True)

    def _clock(self, fault: Fault) -> None:
        now_ns, begun = time.time_ns, time.perf_counter_ns()
        wrong_ns = lambda at_ns: int(fault.seconds * 1e9 + (at_ns - begun) * fault.drift * 1e-6)
        time.time_ns = lambda: now_ns() + wrong_ns(time.perf_counter_ns())
        time.time = lambda: time.time_ns() * 1e-9
        if self._recorder is not None:
            self._recorder.host_clock.skew = wrong_ns

    def _hang(self, fault: Fault) -> None:
        time.sleep(fault.seconds)


def _later(seconds: float, do: Callable[..., None], *args: Any) -> None:
    timer = threading.Timer(max(0.0, seconds), do, args)
    timer.daemon = True
    timer.start()


def _process(who: int | str) -> int:
    """The process that a fault befalls: this one, or one of those above it."""
    if who == HELPER:
        return os.getppid()
    if who == SUPERVISOR:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1])
    return os.getpid()


class _Slowness:
    """How much longer this rank computes, until when."""

    def __init__(self) -> None:
        self._until, self._times, self._leaf = 0.0, 1.0, 0.0

    def begin(self, fault: Fault) -> None:
        self._until, self._times, self._leaf = time.monotonic() + fault.seconds, fault.times, fault.leaf

    def lag(self, kind: str, computed_ns: int) -> None:
        """Sleep as long as a slower rank would still compute. computed_ns: of one micro-batch, waits left out."""
        if time.monotonic() < self._until:
            time.sleep((self._times - 1.0) * computed_ns * 1e-9 + (self._leaf if kind == "forward" else 0.0))


class _SlowSpan(LaggingSpan):
    """A forward or backward of one micro-batch, longer by what the rank is slow."""

    __slots__ = ("slowness",)

    def __exit__(self, *raised: object) -> None:
        self.slowness.lag(self.kind, self.recorder.now_ns() - self.start_ns - self.inner_ns)
        super().__exit__(*raised)


class _PhaseRecorder(Recorder):
    """A recorder that says what begins, and in which a slow rank computes longer."""

    def __init__(self, rank: int, reached: Callable[[str], None], slowness: _Slowness) -> None:
        super().__init__(rank)
        self._reached, self._slowness, self.lag = reached, slowness, PartLag(self)

    def span(self, kind: str, **tags: Any) -> Any:
        if (phase := _PHASES.get(kind)) is not None and threading.current_thread() is threading.main_thread():
            self._reached(phase)
        if kind not in PARTS or ((computes := kind in ("forward", "backward")) and "micro" not in tags):
            return super().span(kind, **tags)
        span = _SlowSpan(self, kind, tags) if computes else LaggingSpan(self, kind, tags)
        span.lag = self.lag
        if isinstance(span, _SlowSpan):
            span.slowness = self._slowness
        return span


class _SampleLog:
    """The samples of the leaves that a rank computes, step by step, in one epoch: for `programs.chaos.counted`."""

    def __init__(self, run: Run, run_dir: Path, epoch: tuple[int, int], sequel: Sequel) -> None:
        self._run, self._epoch, self._sequel = run, epoch, sequel
        self._begins, self._moved = run.step, False
        folder = run_dir / counted.FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{run.mesh.rank:05d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._write({"begins": run.step})

    def add(self, leaves: Sequence[Leaf]) -> None:
        self._see_first()
        run = self._run
        at = [run.mesh.at[axis] for axis in ("dp", "shard")]
        samples = [[number, leaf.samples.tolist()] for number, leaf in zip(run.leaves, leaves, strict=False)]
        self._write({"step": run.step, "at": at, "leaves": samples})

    def close(self) -> None:
        self._see_first()
        os.close(self._file)

    def _see_first(self) -> None:
        """The first step of an epoch is over where the second is begun."""
        if not self._moved and self._run.step > self._begins:
            self._moved = True
            self._sequel.add("step", rank=self._run.mesh.rank, epoch=self._epoch[1], step=self._run.step)

    def _write(self, line: dict[str, Any]) -> None:
        record = {"epoch": self._epoch, "rank": self._run.mesh.rank, **line}
        with suppress(OSError):
            os.write(self._file, json.dumps(record).encode() + b"\n")

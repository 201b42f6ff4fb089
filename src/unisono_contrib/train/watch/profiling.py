"""Some steps of one rank under torch's profiler, with what torch does not know: modules by their names in the whole
model, our spans and messages, the lines of Python that were running, and what the memory held.

Outside of these steps nothing is installed: no hook, no thread, no profiler.
"""

import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from unisono.comm.device import allocator, profiled_activities
from unisono.observe import trace
from unisono.observe.calls import LoggedCall
from unisono.observe.files import write_whole
from unisono.observe.memory import heap, peak_rss_mib, rss_mib
from unisono.observe.span import Span
from unisono.spec.sink import Observer, RunFacts, StepRecord
from unisono_contrib.report.profile.pieces import kernels
from unisono_contrib.train.watch.held_tensors import held_bytes
from unisono_contrib.train.watch.line_sampler import LineSampler
from unisono_contrib.train.watch.module_ranges import ModuleRanges

_MARK = "unisono clock"
_TIMES = 5  # that both clocks are read; the narrowest pair of readings counts


class Profiling(Observer):
    """Profiles the steps first .. last of a rank. stack: Python functions too, call by call."""

    def __init__(self, run: RunFacts, first: int, last: int, stack: bool) -> None:
        self._run, self._first, self._last, self._stack = run, first, last, stack
        self._taken: _Taken | None = None
        path = run.run_dir / "profile" / f"rank{run.rank}.json.gz"
        self._path = path
        if run.step < first:
            path.unlink(missing_ok=True)
        if run.step + 1 == first:
            self._taken = _Taken(run, stack)

    def ended(self, step: int, stop: bool) -> None:
        if self._taken is not None:
            self._taken.steps.append((self._run.recorder.now_ns(), step))
        if self._taken is not None and (step >= self._last or stop):
            taken, self._taken = self._taken, None
            write_whole(self._path, gzip.compress(json.dumps(taken.end(self._first, step)).encode(), 3))
        elif step + 1 == self._first and not stop:
            self._taken = _Taken(self._run, self._stack)

    def close(self) -> None:
        if self._taken is not None:  # the run ends within these steps, by an error
            self._taken.stop()
            self._taken = None

    def observe(self, steps: Sequence[StepRecord]) -> None:
        return None


class _Taken:
    """A profile under way."""

    def __init__(self, run: RunFacts, stack: bool) -> None:
        begun = time.perf_counter()
        self._run = run
        live = run.live
        self._held = held_bytes(live) if live is not None else {}
        self._memory = [_memory(live)]
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *profiled_activities()],
            record_shapes=True, profile_memory=True, with_stack=stack,
        )  # fmt: skip
        self._ranges = ModuleRanges(live.local.stages.values() if live is not None else ())
        block = torch.empty(1)
        with quiet():
            self._profile.start()
            del block  # of each thousandth one that it does not know torch says so
        self._shifts_ns = [self._pair_of_clocks() for _ in range(_TIMES)]
        self._lines = LineSampler()
        self._lines.start()
        self.steps: list[tuple[int, int]] = []  # when each was over
        self._spans: list[Span] = []
        self._calls: list[LoggedCall] = []
        run.recorder.also, run.recorder.calls.also = self._spans, self._calls
        self._start_s = time.perf_counter() - begun

    def _pair_of_clocks(self) -> tuple[int, int]:
        """A mark in torch's profile, and when the recorder says that it began and was over."""
        before = self._run.recorder.now_ns()
        with record_function(_MARK):
            pass
        return before, self._run.recorder.now_ns()

    def stop(self) -> None:
        """No more is recorded."""
        self._run.recorder.also = self._run.recorder.calls.also = None
        self._lines.stop()
        self._ranges.remove()
        with quiet():
            self._profile.stop()

    def end(self, first: int, last: int) -> dict[str, Any]:
        """Stop; what was seen, as the object of a file that tools for Kineto's traces read."""
        begun = time.perf_counter()
        live, run = self._run.live, self._run
        self.stop()
        self._memory.append(_memory(live))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            document: dict[str, Any] = json.loads(path.read_text())
        events = document["traceEvents"]
        shift_us = self._shift_us(events)
        spans = [*self._spans, *self._called()]
        events += [trace.event(span, run.rank, 1000 * shift_us) for span in spans]
        if not any(event.get("cat") == "kernel" for event in events):
            events += kernels(self._spans, run.rank, shift_us)
        document["distributedInfo"] = {"backend": run.backend, "rank": run.rank, "world_size": run.world}
        # By the clock that all hosts share, rather than by torch's reading of this one's.
        at_ns = self._shifts_ns[0][0]
        document["baseTimeNanoseconds"] = (
            run.recorder.host_clock.shared_ns(at_ns) - at_ns - round(1000 * shift_us)
        )
        document["unisono"] = {
            "schema_version": 1, "host": run.host, "coords": dict(run.coords), "first": first, "last": last,
            "held": self._held, "memory": self._memory, "lines": self._lines.table(),
            "sampled_s": self._lines.seconds, "start_s": self._start_s, "stop_s": time.perf_counter() - begun,
        }  # fmt: skip
        return document

    def _shift_us(self, events: Sequence[Mapping[str, Any]]) -> float:
        """What to add to the recorder's microseconds for those of torch's profile."""
        marks = sorted(
            (e for e in events if e.get("name") == _MARK and e["ph"] == "X"), key=lambda e: e["ts"]
        )
        pairs = zip(marks, self._shifts_ns, strict=False)
        return min(
            (after - before, mark["ts"] + mark["dur"] / 2 - (before + after) / 2000)
            for mark, (before, after) in pairs
        )[1]

    def _called(self) -> list[Span]:
        """The collectives, from when this rank was ready for each until it saw it over."""
        return [
            Span(
                "call", call.issued_ns, call.done_ns,
                {"exposed": False, "axis": call.axis, "op": call.op, "number": call.number, "bytes": call.nbytes,
                 "module": call.module, "step": next(step for over, step in self.steps if over >= call.issued_ns)},
            )
            for call in self._calls if call.done_ns and call.op != "recv" and self.steps[-1][0] >= call.issued_ns
        ]  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """What torch's profiler says on stderr when it starts and stops is of no use to a user."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _memory(live: Any) -> dict[str, float]:
    """What this process has from the system, and its allocator from it; bytes."""
    device = live.local.device if live is not None else torch.device("cpu")
    return {"rss": rss_mib() * 2**20, "peak_rss": peak_rss_mib() * 2**20, **heap(), **allocator(device)}

"""trace/rank*.json.gz."""

import re
from collections.abc import Sequence

from pydantic import Field

from unisono.observe import trace
from unisono.spec.sink import Observer, RunFacts, Sink, StepRecord


class TraceSink(Sink):
    """trace/rank*.json.gz: the spans of some steps, for Perfetto and the report. `train.trace_steps` opens it."""

    name = "trace"
    main = "steps"
    every_rank = True

    steps: int = Field(default=3, ge=1, description="steps that are drawn, after the first few")

    def open(self, run: RunFacts) -> Observer:
        if run.rank == 0:  # a resumed run may have fewer ranks
            for path in (run.run_dir / "trace").glob("rank*.json.gz"):
                if int(re.sub(r"\D", "", path.name) or 0) >= run.world:
                    path.unlink()
        return _Tracing(run, self.steps)


class _Tracing(Observer):
    """Keeps spans of the steps first .. last, and writes them when the last of these is over."""

    def __init__(self, run: RunFacts, count: int) -> None:
        self._run = run
        self._first = 1 + run.step + min(5, max(1, (run.steps - run.step) // 2))
        self._last = self._first + count - 1

    def ended(self, step: int, stop: bool) -> None:
        run, recorder = self._run, self._run.recorder
        if step + 1 == self._first:
            recorder.keep = True
        elif recorder.keep and (step >= self._last or stop):
            recorder.keep = False
            now_ns = recorder.now_ns()
            trace.write(
                run.run_dir / "trace" / f"rank{run.rank}.json.gz",
                recorder.take(),
                run.rank,
                run.world,
                epoch_ns=recorder.host_clock.shared_ns(now_ns) - now_ns,
                host=run.host,
                backend=run.backend,
                coords=run.coords,
            )

    def observe(self, steps: Sequence[StepRecord]) -> None:
        return None

"""events/rank*.jsonl."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from unisono.observe.metrics import JsonLines, forget_after
from unisono.spec.sink import Observer, RunFacts, Sink, StepRecord


class EventsSink(Sink):
    """events/rank*.jsonl: where each rank's time and bytes went. Every run has it."""

    name = "events"
    every_rank = True

    def open(self, run: RunFacts) -> Observer:
        folder = run.run_dir / "events"
        forget_after(folder / f"rank{run.rank}.jsonl", run.step)
        if run.rank == 0:  # a resumed run may have fewer ranks
            for path in folder.glob("rank*.jsonl"):
                if int(re.sub(r"\D", "", path.stem) or 0) >= run.world:
                    forget_after(path, run.step)
        return _Events(JsonLines(folder / f"rank{run.rank}.jsonl"), run)


class _Events(Observer):
    def __init__(self, file: JsonLines, run: RunFacts) -> None:
        self._file, self._rank = file, run.rank
        try:
            said = {"collective": run.collective} if run.collective else {}
            file.write({"kind": "info", "rank": run.rank, "host": run.host, "coords": run.coords, **said})
        except OSError:
            with suppress(OSError):
                file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def observe(self, steps: Sequence[StepRecord]) -> None:
        self._file.write(*map(self._line, steps))

    def _line(self, record: StepRecord) -> dict[str, Any]:
        line = {
            "kind": "step",
            "step": record.step,
            "rank": self._rank,
            "time": record.times,
            "bytes": record.nbytes,
            "ledger": record.ledger,
            "mem_mib": record.mem_mib,
            "start": record.start,
            "calls": record.calls,
        }
        beside = {"clock": record.clock, "calls_left_out": record.calls_left_out, "modules": record.modules}
        return line | {key: value for key, value in beside.items() if value} | dict(record.host)

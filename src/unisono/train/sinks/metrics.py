"""metrics.jsonl."""

from collections.abc import Sequence

from unisono.observe.metrics import JsonLines, forget_after
from unisono.spec.sink import Observer, RunFacts, Sink, StepRecord


class MetricsSink(Sink):
    """metrics.jsonl: one line a step. Every run has it."""

    name = "metrics"

    def open(self, run: RunFacts) -> Observer:
        path = run.run_dir / "metrics.jsonl"
        forget_after(path, run.step)
        return _Metrics(JsonLines(path))


class _Metrics(Observer):
    def __init__(self, file: JsonLines) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()

    def observe(self, steps: Sequence[StepRecord]) -> None:
        self._file.write(
            *(
                {
                    "step": record.step,
                    "loss": record.loss,
                    "lr": record.lr,
                    "grad_norm": record.grad_norm,
                    "tokens": record.tokens,
                    "tokens_per_s": round(record.tokens / record.seconds, 1),
                    "time": record.times,
                    "bytes_sent": sum(record.nbytes.values()),
                    "ledger": record.ledger,
                    "mem_mib": record.mem_mib,
                    **record.says,
                }
                for record in steps
            )
        )

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
                    "step": one.step,
                    "loss": one.loss,
                    "lr": one.lr,
                    "grad_norm": one.grad_norm,
                    "tokens": one.tokens,
                    "tokens_per_s": round(one.tokens / one.seconds, 1),
                    "time": one.times,
                    "bytes_sent": sum(one.nbytes.values()),
                    "ledger": one.ledger,
                    "mem_mib": one.mem_mib,
                    **one.says,
                }
                for one in steps
            )
        )

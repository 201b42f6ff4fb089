"""metrics.csv."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from unisono.observe.files import Appender, write_whole
from unisono.observe.span import PARTS
from unisono.spec.sink import Observer, RunFacts, Sink, StepRecord

_HEAD = ("step", "loss", "lr", "grad_norm", "tokens", "seconds", "bytes_sent", "mem_mib")


class CsvSink(Sink):
    """metrics.csv: one row a step, seconds of each part as columns, for spreadsheets and data frames."""

    name = "csv"

    def open(self, run: RunFacts) -> Observer:
        path = run.run_dir / "metrics.csv"
        rows = _rows_until(path, run.step)
        head = ",".join((*_HEAD, *(f"{part}_s" for part in PARTS)))
        write_whole(path, "".join(f"{row}\n" for row in [head, *rows]))
        return _Rows(path)


def _rows_until(path: Path, step: int) -> list[str]:
    """The whole rows of steps up to `step`; a row that a killed run left half written is none of them."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    whole = [line for line in lines if line.count(",") == len(_HEAD) + len(PARTS) - 1]
    return [line for line in whole if int(line.partition(",")[0]) <= step]


class _Rows(Observer):
    def __init__(self, path: Path) -> None:
        self._file = Appender(path)

    def close(self) -> None:
        self._file.close()

    def observe(self, steps: Sequence[StepRecord]) -> None:
        text = io.StringIO(newline="")
        rows = csv.writer(text, lineterminator="\n")
        for record in steps:
            sent = sum(record.nbytes.values())
            known = (
                record.step,
                record.loss,
                record.lr,
                record.grad_norm,
                record.tokens,
                record.seconds,
                sent,
                record.mem_mib,
            )
            rows.writerow((*known, *(record.times.get(part, 0.0) for part in PARTS)))
        self._file.append(text.getvalue().encode())

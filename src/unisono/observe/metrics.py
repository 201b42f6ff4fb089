"""Metrics as lines of JSON: one object a line, readable while the run is going on and after a crash."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from unisono.observe.files import Appender, whole_file, write_whole

# Made once: json.dumps with options makes one at every call, which costs as much as the encoding.
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class JsonLines(Appender):
    """Appends objects to a file, flushed to the system as they are written."""

    def write(self, *records: Mapping[str, Any]) -> None:
        """A line for each, or OSError and none. Numbers that are not finite become null: JSON has no word for them."""
        self.append("".join(f"{_line(record)}\n" for record in records).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and how many lines were damaged. Raises OSError."""
    records, damaged = [], 0
    for line in whole_file(path).splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also what bytes that are not text raise
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


def read_steps(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The same of what a run wrote of its steps. They count from 1, also in runs of long ago, which counted from 0."""
    records, damaged = read_lines(path)
    if any(record.get("step") == 0 for record in records):
        whole = [isinstance(record.get("step"), int) for record in records]
        records = [
            {**line, "step": line["step"] + 1} if has else line
            for line, has in zip(records, whole, strict=True)
        ]
    return records, damaged


def last_step(path: Path) -> int:
    """The last step that a run wrote down; 0 where there is none."""
    if not path.is_file():
        return 0
    return max((record["step"] for record in read_steps(path)[0] if "step" in record), default=0)


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`: a resumed run makes them again. Killed here, the file is as it was."""
    if path.is_file():
        kept = [record for record in read_steps(path)[0] if "step" not in record or record["step"] <= step]
        write_whole(path, "".join(f"{_line(record)}\n" for record in kept))


def _line(record: Mapping[str, Any]) -> str:
    try:
        return _dumps(record)
    except ValueError:  # a number that is not finite: rare, so looked for only then
        return _dumps(plain(record))


def plain(value: Any) -> Any:
    """`value` as JSON has words for: numbers that are not finite become null, what is no value its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)

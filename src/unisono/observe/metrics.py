"""Metrics as lines of JSON: one object a line, readable while the run is going on and after a crash."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


class JsonLines:
    """Appends objects to a file, each line flushed to the system as it is written.

    A line left half written by a killed run is closed first, so that it can spoil only itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if self._file.tell() and _last_byte(self.path) != b"\n":
            self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """One line. Numbers that are not finite become null: JSON has no word for them."""
        line = json.dumps(_plain(record), separators=(",", ":"), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and how many lines were damaged. Raises OSError."""
    records, damaged = [], 0
    for line in Path(path).read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # also what bytes that are not text raise
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

"""A line of JSON a sample."""

from collections.abc import Iterator
from typing import Any

from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.tokenised.records import parsed
from unisono_contrib.train.data.stream.formats import PART, PartRecords, Place, ShardFormat
from unisono_contrib.train.data.stream.store import ShardReader, lines_at


class LinesFormat(ShardFormat):
    """Lines of JSON."""

    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        first = 0
        while first < reader.size:
            stop = next(lines_at(reader, min(first + PART, reader.size) - 1), reader.size)
            yield range(first, stop)
            first = stop

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        records: list[tuple[int, Any]] = []
        at = 0
        for line in raw.split(b"\n"):
            if line.strip():
                try:
                    records.append((start + at, parsed(line)))
                except BadRecord as error:
                    records.append((start + at, error))
            at += len(line) + 1
        return PartRecords(raw, records)


FORMAT = LinesFormat()

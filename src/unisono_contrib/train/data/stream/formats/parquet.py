"""Tables of Parquet: a row a sample, a row group a part. Needs pyarrow. A picture is a column of bytes, or a struct
with `bytes` in it, as `datasets` of Hugging Face writes them."""

import base64
import io
from collections.abc import Iterator
from typing import Any

from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import BadRecord
from unisono_contrib.train.data.stream.formats import PartRecords, Place, ShardFile, ShardFormat
from unisono_contrib.train.data.stream.store import ShardReader

_MAGIC = b"PAR1"


class _Stretch(io.RawIOBase):
    """A file of which some bytes are there: those of a row group."""

    def __init__(self, size: int, start: int, there: bytes) -> None:
        self._size, self._start, self._there, self._at = size, start, there, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        first = self._at - self._start
        stop = len(self._there) if size < 0 else min(len(self._there), first + size)
        if first < 0 or stop <= first:
            raise OSError(f"bytes from {self._at:,} on are not those of this row group")
        self._at += stop - first
        return self._there[first:stop]


def _file(extra: str, start: int = 0, raw: bytes = b"") -> Any:
    """A table of which the footer is known, and these bytes are there. Raises UsageError D10."""
    try:
        from pyarrow import BufferReader
        from pyarrow.parquet import ParquetFile, read_metadata
    except ImportError as error:
        raise UsageError(
            "Parquet is read with pyarrow, which is not installed",
            code="D10",
            where="data.source",
            fix="pip install 'unisono[data]'",
        ) from error
    size, _, footer = extra.partition(" ")
    metadata = read_metadata(BufferReader(base64.b64decode(footer)))
    return ParquetFile(_Stretch(int(size), start, raw), metadata=metadata, pre_buffer=False)


def _spans(metadata: Any) -> list[range]:
    """Where the columns of each row group lie."""
    spans = []
    for i in range(metadata.num_row_groups):
        columns = [metadata.row_group(i).column(k) for k in range(metadata.num_columns)]
        firsts = [
            min(filter(None, (c.dictionary_page_offset, c.data_page_offset)), default=0) for c in columns
        ]
        ends = [first + c.total_compressed_size for first, c in zip(firsts, columns, strict=True)]
        spans.append(range(min(firsts, default=0), max(ends, default=0)))
    return spans


class TableFormat(ShardFormat):
    """Rows. extra: the size of the shard and its footer."""

    def about(self, reader: ShardReader, shard: ShardFile) -> str:
        tail = reader.read(max(0, reader.size - 8), reader.size)
        length = int.from_bytes(tail[:4], "little") + 8
        if tail[4:] != _MAGIC or length > reader.size:
            return ""
        footer = reader.store.read(reader.path, reader.size - length, reader.size)
        return f"{reader.size} {base64.b64encode(footer).decode()}"

    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        if not extra:
            yield 0, BadRecord("no Parquet, or one that is cut off: its footer is not there")
            return
        try:
            file = _file(extra)
        except Exception as error:  # pyarrow has errors of many kinds
            yield 0, BadRecord(f"its footer cannot be read: {str(error)[:200]}")
            return
        yield from _spans(file.metadata)

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        file = _file(extra, start, raw)
        spans = _spans(file.metadata)
        group = next(i for i, span in enumerate(spans) if span.start == start and len(span) == len(raw))
        row = sum(file.metadata.row_group(i).num_rows for i in range(group))
        rows = range(row, row + file.metadata.row_group(group).num_rows)
        try:
            table = file.read_row_group(group, use_threads=False).to_pylist()
        except Exception as error:  # as above
            why = BadRecord(f"its row group cannot be read: {str(error)[:200]}")
            return PartRecords(b"", [(at, why) for at in rows])
        body, records = bytearray(), list[Place]()
        for at, record in zip(rows, table, strict=True):
            for name, value in record.items():
                within = value.get("bytes") if isinstance(value, dict) else value
                if isinstance(within, bytes):
                    record[name] = slice(len(body), len(body) + len(within))
                    body += within
            records.append((at, record))
        return PartRecords(bytes(body), records)


FORMAT = TableFormat()

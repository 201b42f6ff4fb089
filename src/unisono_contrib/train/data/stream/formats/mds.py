"""Shards of mosaicml-streaming: a table of offsets, then samples of columns in a fixed order
(github.com/mosaicml/streaming, format MDS). Columns that are pickled are refused."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home
from unisono.train.data.tokenised.chats import BadRecord
from unisono_contrib.train.data.stream.formats import PART, PartRecords, Place, ShardFile, ShardFormat
from unisono_contrib.train.data.stream.store import ShardReader, ShardStore, is_remote, stretches

_BODIES = ("bytes", "jpeg", "jpeg_array", "jpegarray", "png")  # columns that stay bytes
_VALUES: Mapping[str, Callable[[bytes], Any]] = {
    "str": lambda body: body.decode(),
    "json": json.loads,
    "int": lambda body: int(np.frombuffer(body, "<i8")[0]),
    "str_int": lambda body: int(body.decode()),
    "str_float": lambda body: float(body.decode()),
    **{
        name: lambda body, name=name: np.frombuffer(body, np.dtype(name).newbyteorder("<"))[0].item()
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{
        name: lambda body, name=name: np.frombuffer(body, np.dtype(name).newbyteorder("<"))[0].item()
        for name in ("float16", "float32", "float64")
    },
}


class MosaicFormat(ShardFormat):
    """Columns by a table of offsets. extra: JSON of the names, encodings and sizes of columns."""

    as_stored = True

    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        count = int.from_bytes(reader.read(0, 4), "little")
        table = reader.read(4, 4 + 4 * (count + 1))
        ends = np.frombuffer(table[: len(table) // 4 * 4], "<u4").astype(np.int64)
        if len(ends) != count + 1 or not count or (np.diff(ends) < 0).any() or ends[-1] != reader.size:
            yield (
                0,
                BadRecord(f"its table of {count:,} samples does not fit a shard of {reader.size:,} bytes"),
            )
            return
        for part in stretches(ends.tolist(), PART):
            yield range(int(ends[part.start]), int(ends[part.stop]))

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        columns, records, at = json.loads(extra), list[Place](), 0
        # The table lies before the first part: sizes of columns say where a sample ends.
        while at < len(raw):
            record, end = _sample(raw, at, columns)
            records.append((start + at, record))
            if isinstance(record, BadRecord):
                break  # nobody knows where the next one begins
            at = end
        return PartRecords(raw, records)


def _sample(raw: bytes, at: int, columns: list[tuple[str, str, int | None]]) -> tuple[Any, int]:
    """(fields, where the next sample begins)."""
    sizes, head = [], at
    for _, _, size in columns:
        sizes.append(int.from_bytes(raw[head : head + 4], "little") if size is None else size)
        head += 4 if size is None else 0
    if head + sum(sizes) > len(raw):
        return BadRecord("its columns are longer than the part that they lie in"), len(raw)
    fields: dict[str, Any] = {}
    for (name, encoding, _), size in zip(columns, sizes, strict=True):
        here, head = slice(head, head + size), head + size
        if encoding in _BODIES:
            fields[name] = here
        elif encoding in _VALUES:
            try:
                fields[name] = _VALUES[encoding](raw[here])
            except (ValueError, IndexError) as error:
                return BadRecord(f"column {name} is no {encoding}: {error}"), head
    return fields, head


class WholeMosaicFormat(MosaicFormat):
    """A shard that was decompressed: the table of offsets is within."""

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        count = int.from_bytes(raw[:4], "little")
        first = int.from_bytes(raw[4:8], "little")
        if not 8 + 4 * count <= first <= len(raw):
            return PartRecords(b"", [(0, BadRecord("its table of samples does not fit"))])
        return super().unpack(raw[first:], first, extra)


def mosaic_shards(store: ShardStore, folder: str) -> list[ShardFile]:
    """The shards that `index.json` of a folder names. Raises UsageError D02, D13."""
    place = f"{folder.rstrip('/')}/index.json"
    text = store.read(place, 0, store.size(place))
    try:
        listed = json.loads(text)["shards"]
        shards = []
        for each in listed:
            if each["format"] != "mds":
                raise ValueError(f"shards of format {each['format']}")
            columns = list(
                zip(each["column_names"], each["column_encodings"], each["column_sizes"], strict=True)
            )
            zipped = each.get("zip_data") if each.get("compression") else None
            if zipped is not None and _is_unpacked(folder, each["raw_data"]["basename"], zipped["basename"]):
                zipped = None
            name = (zipped or each["raw_data"])["basename"]
            format_name = "mds" if zipped is None else f"mds.{_compression(each['compression'])}"
            shards.append(ShardFile(f"{folder.rstrip('/')}/{name}", format_name, json.dumps(columns)))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"no index of MDS shards: {type(error).__name__}: {error}",
            code="D13", where=place, fix="the index.json that MDSWriter wrote beside its shards",
        ) from error  # fmt: skip
    return shards


def _is_unpacked(folder: str, plain: str, zipped: str) -> bool:
    """Whether the decompressed shard alone is there, as in a cache of mosaicml-streaming."""
    here = at_home(folder)
    return not is_remote(folder) and not (here / zipped).exists() and (here / plain).exists()


def _compression(said: str) -> str:
    name = said.partition(":")[0]
    endings = {"gz": "gz", "gzip": "gz", "bz2": "bz2", "zstd": "zst", "zst": "zst"}
    if name not in endings:
        raise ValueError(f"compression {name}")
    return endings[name]


FORMAT = MosaicFormat()
WHOLE = WholeMosaicFormat()

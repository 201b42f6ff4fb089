"""What shards hold: samples, one behind the other, in parts that can be read by themselves. A file a format. No torch.

A part is a stretch of bytes of a shard that begins and ends with a sample. Where parts begin follows from the shard
alone. `cut` says where, reading the shard from its beginning to its end; `unpack` makes samples of the bytes of a part.
"""

import bz2
import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import BadRecord
from unisono_contrib.train.data.stream.store import ShardReader, ShardStore, is_remote

PART = 8 << 20  # bytes of a part, about; fixed, for the order of samples follows from it
Record = Mapping[str, Any]  # a field of bytes is a slice of the part's body
Place = tuple[int, Record | BadRecord]  # the byte of the shard, of a table the row, where a sample stands


@dataclass(frozen=True, slots=True)
class ShardFile:
    """path: a file or URL. format: the name of its format. extra: what its format knows of it from elsewhere."""

    path: str
    format: str
    extra: str = ""


@dataclass(frozen=True, slots=True)
class PartRecords:
    """A part. body: its bytes. records: where each sample stands, and its fields."""

    body: bytes
    records: list[Place]


class ShardFormat(ABC):
    """as_stored: whether the body of a part is its bytes in the shard, so that a local shard needs no copy."""

    as_stored: ClassVar[bool] = False

    def about(self, reader: ShardReader, shard: ShardFile) -> str:
        """What `unpack` takes of the shard besides a part's bytes."""
        return shard.extra

    @abstractmethod
    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        """The parts of a shard, as stretches of bytes; and what is wrong between them."""

    @abstractmethod
    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        """The samples of a part. start: its first byte in the shard."""


class Compressed(ShardFormat):
    """A shard that is compressed as a whole: one part, of another format within."""

    def __init__(self, inner: ShardFormat, decompress: Callable[[bytes], bytes]) -> None:
        self._inner, self._decompress = inner, decompress

    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        yield range(reader.size)

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        try:
            body = self._decompress(raw)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            return PartRecords(b"", [(0, BadRecord(f"it cannot be decompressed: {error}"))])
        return self._inner.unpack(body, 0, extra)


def format_of(name: str) -> ShardFormat:
    """`tar`, `jsonl`, `mds` or `parquet`, with `.gz`, `.bz2` or `.zst` behind it where the shard is compressed."""
    inner, _, compression = name.partition(".")
    module = import_module(f"{__name__}.{inner}")
    if not compression:
        return module.FORMAT
    return Compressed(getattr(module, "WHOLE", module.FORMAT), _DECOMPRESS[compression])


def named(path: str, kind: str) -> str:
    """The name of a shard's format: `kind`, and how its name says that it is compressed."""
    ending = path.rpartition(".")[2].lower()
    compression = {"gz": "gz", "tgz": "gz", "zst": "zst", "zstd": "zst"}.get(ending, "")
    return f"{kind}.{compression}" if compression else kind


def _unzstd(raw: bytes) -> bytes:
    try:
        codec = import_module("zstandard")
    except ImportError as error:
        raise UsageError(
            "shards in zstd are read with zstandard, which is not installed",
            code="D10",
            where="data.source",
            fix="pip install 'unisono[data]'",
        ) from error
    try:
        with codec.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
            return stream.read()
    except codec.ZstdError as error:
        raise ValueError(str(error)) from error


_DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "gz": gzip.decompress,
    "bz2": bz2.decompress,
    "zst": _unzstd,
}


def shards_of(store: ShardStore, pattern: str, kind: str, endings: Sequence[str]) -> list[ShardFile]:
    """The shards that a pattern means; of a folder, the files with these endings. Raises UsageError D02, D04."""
    shards = []
    for path in store.expanded(pattern):
        place = Path(path)
        if is_remote(path) or not place.is_dir():
            shards.append(path)
            continue
        inside = sorted(str(file) for file in place.rglob("*") if file.name.endswith(tuple(endings)))
        if not inside:
            raise UsageError(
                f"the folder holds no file that ends in {' or '.join(endings)}",
                code="D04", where=path, fix="a pattern of shards, such as {000..049}",
            )  # fmt: skip
        shards += inside
    return [ShardFile(path, named(path, kind)) for path in shards]

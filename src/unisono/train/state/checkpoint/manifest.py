"""`manifest.json`: what a checkpoint holds, where each block lies, and how to know that it is whole."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from unisono.spec.doubtful import parse, read_regular
from unisono.train.state.checkpoint.boxes import Extent, tiling_fault
from unisono.train.state.checkpoint.tensorfile import DTYPES, Damage, FileEntry

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
SIZE_LIMIT = 1 << 30  # bytes; a manifest of a million blocks has about 200 MB
FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")

Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
Shape = Annotated[tuple[Natural, ...], Field(max_length=64)]  # torch has no more dims


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor: `key` in `file`, its offset in the full tensor, its shape, checksum and length."""

    file: str
    key: str
    start: Shape
    shape: Shape
    crc32: str
    bytes: Natural


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: Shape
    blocks: tuple[StoredBox, ...]

    def extents(self) -> list[Extent]:
        return [(block.start, block.shape) for block in self.blocks]


@dataclass(frozen=True)
class Manifest:
    schema_version: int
    step: Natural
    attempt: str
    world: Natural
    state: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class Marker:
    """What one rank tells the others once its file is on disk: `rank-00000.json` in the folder being written."""

    attempt: str
    rank: Natural
    world: Natural
    file: FileEntry | None
    tensors: dict[str, TensorEntry]


_MANIFEST = TypeAdapter(Manifest)
_MARKER = TypeAdapter(Marker)
_HEAD = b'{"blake2b": "%s",\n'
_HEAD_BYTES = len(_HEAD % (b"0" * 64))


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def block_key(name: str, start: Shape) -> str:
    """The key of a block in its file: "name@row,column"."""
    return f"{name}@{','.join(map(str, start))}"


def encode(manifest: Manifest) -> bytes:
    """The manifest as one JSON object whose first line carries the BLAKE2b-256 of all bytes after that line.

    Raises ValueError or TypeError if the state is not JSON.
    """
    body = json.dumps(asdict(manifest), allow_nan=False).encode()[1:] + b"\n"
    return _HEAD % hashlib.blake2b(body, digest_size=32).hexdigest().encode() + body


def decode(data: bytes) -> Manifest:
    """Inverse of `encode`. Raises Damage unless every byte is as written and every value makes sense."""
    head, body = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
    if head != _HEAD % hashlib.blake2b(body, digest_size=32).hexdigest().encode():
        raise Damage("fails its checksum", file=MANIFEST)
    try:
        raw = parse(data)
        raw.pop("blake2b")
        version = raw.get("schema_version")
        if version != SCHEMA_VERSION:
            raise Damage(f"has schema version {version}, this program reads {SCHEMA_VERSION}", file=MANIFEST)
        manifest = _MANIFEST.validate_python(raw)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise Damage(f"is not a manifest ({str(error).splitlines()[0]})", file=MANIFEST) from error
    if fault := _fault(manifest):
        raise Damage(fault, file=MANIFEST)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises Damage."""
    path = folder / MANIFEST
    try:
        data = read_regular(path, SIZE_LIMIT)
    except FileNotFoundError as error:
        what = "is missing: the save never finished" if folder.is_dir() else "is missing, and its folder too"
        raise Damage(what, file=MANIFEST) from error
    except OSError as error:
        raise Damage(f"cannot be read ({error.strerror})", file=MANIFEST) from error
    if data is None:
        raise Damage("is too large to be a manifest", file=MANIFEST)
    return decode(data)


def encode_marker(marker: Marker) -> bytes:
    return json.dumps(asdict(marker)).encode()


def decode_marker(data: bytes) -> Marker:
    """Raises ValueError if these bytes are not a marker."""
    return _MARKER.validate_python(json.loads(data))


def merge(markers: Sequence[Marker], step: int, attempt: str, state: dict[str, Any]) -> Manifest:
    """One manifest out of what each rank wrote.

    Raises ValueError if ranks disagree about a tensor, or the blocks of a tensor do not tile it: such a checkpoint
    could never be loaded, and the time to say so is when it is saved.
    """
    tensors: dict[str, TensorEntry] = {}
    blocks: dict[str, list[StoredBox]] = {}
    for marker in markers:
        for name, entry in marker.tensors.items():
            known = tensors.setdefault(name, entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"{name!r} is {known.dtype} {list(known.shape)} on one rank and {entry.dtype} "
                    f"{list(entry.shape)} on rank {marker.rank}"
                )
            blocks.setdefault(name, []).extend(entry.blocks)
    whole = {
        name: TensorEntry(
            entry.dtype, entry.shape, tuple(sorted(blocks[name], key=lambda block: block.start))
        )
        for name, entry in sorted(tensors.items())
    }
    for name, entry in whole.items():
        if fault := tiling_fault(entry.shape, entry.extents()):
            raise ValueError(f"{name!r}: {fault}")
    files = {rank_file(marker.rank): marker.file for marker in markers if marker.file is not None}
    return Manifest(SCHEMA_VERSION, step, attempt, len(markers), state, files, whole)


def _fault(manifest: Manifest) -> str:
    """What no writer of ours would have written, "" if nothing: a path that leaves the folder, sizes that disagree."""
    left = {}
    for file, entry in manifest.files.items():
        if not FILE_NAME.fullmatch(file):
            return f"names a file {file!r}"
        left[file] = entry.bytes - entry.header_bytes
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            return f"{name!r} has an unknown dtype {entry.dtype!r}"
        for block in entry.blocks:
            if block.file not in left:
                return f"a block of {name!r} lies in {block.file!r}, which is not listed"
            if block.bytes != prod(block.shape) * DTYPES[entry.dtype].itemsize:
                return f"a block of {name!r} has {block.bytes} bytes, which does not fit its shape"
            left[block.file] -= block.bytes
    # Files have no holes, so that nobody allocates more than the files hold.
    return "".join(f"the blocks in {file!r} do not fill it" for file, rest in left.items() if rest)[:200]

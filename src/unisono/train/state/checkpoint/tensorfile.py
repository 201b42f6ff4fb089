"""One rank's tensors in one safetensors file, with a checksum taken of each tensor as its bytes pass.

The format is the public one (8 bytes header length, JSON header, data without holes) and the safetensors library
reads these files. Writing and reading are our own because both must see the bytes: a checksum costs no second pass
this way, a full disk arrives as OSError with its errno, and a failing disk as OSError too, where a memory map would
kill the process by SIGBUS.

CRC-32 (IEEE 802.3, by zlib): finds every flip of one bit and every burst of up to 32 bits, misses other damage once in
2^32, runs at 4 to 6 GB/s on one core (faster than most disks) without holding the interpreter lock, and comes with
Python. It guards
against accidents and not against forgery; nothing that could run is stored, so there is nothing to forge for.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from unisono.observe.files import write_all
from unisono.spec.doubtful import open_regular, parse, plain

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 100 << 20  # bytes; the safetensors library refuses more too
CHUNK = 4 << 20  # bytes per write: small enough that checksum and write find it in cache


class Damage(Exception):
    """Stored bytes are not what was written. `file` and `tensor` say where, as far as known."""

    def __init__(self, what: str, *, file: str = "", tensor: str = "") -> None:
        super().__init__(what)
        self.what, self.file, self.tensor = (plain(part) for part in (what, file, tensor))

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.what) if part)


@dataclass(frozen=True)
class FileEntry:
    """What the manifest knows of a file: its length and its header, which locates every tensor in it."""

    bytes: int
    header_bytes: int
    header_crc32: str


@dataclass(frozen=True)
class Written:
    file: FileEntry
    crc32: dict[str, str]  # key -> checksum of the tensor's bytes


def checksum(data: memoryview | bytes | bytearray, so_far: int = 0) -> int:
    return zlib.crc32(data, so_far)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes; a copy only if it is not already so on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> Written:
    """Write non-empty tensors under distinct keys, fsync the file, return lengths and checksums. Raises OSError."""
    # Wider elements first keeps every tensor aligned for readers that map the file.
    ordered = sorted(tensors, key=lambda pair: (-pair[1].element_size(), pair[0]))
    header: dict[str, Any] = {}
    at = 0
    for key, tensor in ordered:
        stop = at + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    sums: dict[str, str] = {}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, head)
        for key, tensor in ordered:
            data, crc = as_bytes(tensor), 0
            for first in range(0, len(data), CHUNK):
                part = data[first : first + CHUNK]
                crc = checksum(part, crc)
                write_all(fd, part)
            sums[key] = f"{crc:08x}"
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(FileEntry(len(head) + at, len(head), f"{checksum(head):08x}"), sums)


class TensorFile:
    """A rank's file opened for reading; its length and header are checked at once, each tensor when it is read.

    Raises Damage if the file is missing, cut short, unreadable, or is not the file the manifest describes.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.name = path.name
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise Damage(_reason(error), file=self.name) from error
        try:
            self._header = self._read_header(entry)
        except BaseException:
            os.close(self._fd)
            raise
        self._data_at, self._data_bytes = entry.header_bytes, entry.bytes - entry.header_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def _read_header(self, entry: FileEntry) -> dict[str, Any]:
        size = os.fstat(self._fd).st_size
        if size != entry.bytes:
            raise Damage(f"has {size} bytes, {entry.bytes} were written", file=self.name)
        if not 8 <= entry.header_bytes <= min(size, HEADER_LIMIT):
            raise Damage("the manifest gives an impossible header length", file=self.name)
        head = bytearray(entry.header_bytes)
        self._read_into(0, memoryview(head), "header")
        if f"{checksum(head):08x}" != entry.header_crc32:
            raise Damage("its header fails the checksum", file=self.name)
        try:
            header = parse(bytes(head[8:]))
        except (ValueError, RecursionError) as error:
            raise Damage("its header is not JSON", file=self.name) from error
        if not isinstance(header, dict):
            raise Damage("its header is not a safetensors header", file=self.name)
        return header

    def _read_into(self, at: int, out: memoryview, tensor: str) -> None:
        try:
            while out:
                count = os.preadv(self._fd, [out], at)
                if not count:
                    raise Damage("the file ended too early", file=self.name, tensor=tensor)
                out, at = out[count:], at + count
        except OSError as error:
            raise Damage(_reason(error), file=self.name, tensor=tensor) from error

    def _locate(self, key: str, dtype: str, shape: list[int], size: int) -> int | None:
        """Where the tensor's bytes begin after the header, None if the header does not hold just this tensor."""
        match self._header.get(key):
            case {"dtype": kind, "shape": extent, "data_offsets": [int(first), int(stop)]}:
                fits = (kind, extent, stop - first) == (dtype, shape, size)
                return first if fits and first >= 0 and stop <= self._data_bytes else None
        return None

    def read(
        self, key: str, dtype: torch.dtype, shape: Sequence[int], crc32: str, scratch: torch.Tensor
    ) -> torch.Tensor:
        """The tensor under `key`, verified, as a view into `scratch` (uint8, 1-D, large enough).

        Raises Damage if the file does not hold that key with that dtype and shape, or its bytes fail the checksum.
        """
        size = prod(shape) * dtype.itemsize
        first = self._locate(key, NAMES[dtype], list(shape), size)
        if first is None:
            raise Damage("the header has no such block", file=self.name, tensor=key)
        raw = scratch[:size]
        view = raw.numpy().data
        self._read_into(self._data_at + first, view, key)
        if f"{checksum(view):08x}" != crc32:
            raise Damage("its bytes fail the checksum", file=self.name, tensor=key)
        return raw.view(dtype).reshape(tuple(shape))


def _reason(error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError)
    return "the file is missing" if missing else f"cannot be read ({error.strerror})"

"""Token files of others, memory-mapped: raw uint16 as nanoGPT writes, and Megatron's .bin beside its .idx."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home
from unisono.train.data.dataset import token_out_of_range
from unisono.train.data.documents import existing, unreadable

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SCANNED = 1 << 25  # tokens at each end that are checked before training starts: some tens of milliseconds


@dataclass(frozen=True, slots=True)
class TokenFile:
    """tokens: [n], memory-mapped, read-only. documents: how many the index names, 0 where there is none."""

    path: Path
    tokens: np.ndarray
    documents: int = 0


def open_tokens(path: str) -> tuple[TokenFile, TokenFile | None]:
    """(training tokens, validation tokens or None where one file serves both).

    path: a raw file, a Megatron pair by either name or without suffix, or a folder with train.bin and val.bin.
    Raises UsageError D02 .. D13, each with the path.
    """
    named = at_home(path)
    if path and not named.exists() and named.with_name(named.name + ".bin").exists():
        return open_file(named.with_name(named.name + ".bin")), None
    place = existing(path)
    if not place.is_dir():
        return open_file(place.with_suffix(".bin") if place.suffix == ".idx" else place), None
    train = place / "train.bin"
    if not train.exists():
        files = sorted(p.name for p in place.glob("*.bin"))
        raise UsageError(
            "the folder holds no train.bin",
            code="D02",
            where=str(place),
            likely=f"it holds {', '.join(files[:3])}" if files else "it holds no .bin file at all",
            fix=f'data.source = "bin:{place / files[0]}"' if files else 'data.source = "bin:FILE"',
        )
    val = place / "val.bin"
    return open_file(train), open_file(val) if val.exists() else None


def open_file(path: Path) -> TokenFile:
    """One token file; with an .idx beside it, that index says the type and the length."""
    index = path.with_suffix(".idx")
    try:
        size = path.stat().st_size
        if size == 0:
            raise UsageError(
                "the token file is empty",
                code="D04",
                where=str(path),
                fix="write tokens into it: uint16 each",
            )
        if index.exists() and index != path:
            return _open_megatron(path, size, index)
        if size % 2:
            raise UsageError(
                f"{size:,} bytes are no whole number of uint16 tokens",
                code="D07",
                where=str(path),
                likely="the file was cut off, or is no token file",
                fix=f'for text: data.source = "text:{path}"',
            )
        return TokenFile(path, np.asarray(np.memmap(path, dtype="<u2", mode="r")))
    except OSError as error:
        raise unreadable(path, error) from error


def _open_megatron(path: Path, size: int, index: Path) -> TokenFile:
    """The layout of Megatron-LM's indexed dataset, version 1: header, int32 sizes, int64 offsets, int64 documents."""

    def broken(what: str, likely: str = "a copy that was cut off") -> UsageError:
        return UsageError(what, code="D13", where=str(index), likely=likely, fix="write the pair again")

    with index.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise broken("not an index of Megatron's layout", "another program's .idx")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != 1:
        raise broken(f"index version {version} is unknown; version 1 is known", "a newer Megatron")
    if code not in _DTYPES:
        raise broken(f"type code {code} is no integer type", "an index of something else than tokens")
    if index.stat().st_size < _HEADER.size + sequences * 12 + documents * 8:
        raise broken(f"the index ends before its {sequences:,} sequences do")
    sizes = (
        np.memmap(index, dtype="<i4", mode="r", offset=_HEADER.size, shape=(sequences,)) if sequences else []
    )
    count = int(np.sum(sizes, dtype=np.int64))
    dtype = np.dtype(_DTYPES[code])
    if count * dtype.itemsize != size:
        raise broken(
            f"the index names {count * dtype.itemsize:,} bytes of tokens, the .bin file has {size:,}"
        )
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    return TokenFile(path, tokens, max(documents - 1, 0))


def check_tokens(file: TokenFile, vocab: int) -> None:
    """Looks through both ends of the file for tokens outside 0 .. vocab - 1; the rest is checked as it is read.

    Raises UsageError D09 with the first position.
    """
    starts = sorted({0, max(len(file.tokens) - _SCANNED, 0)})
    for start in starts:
        part = file.tokens[start : start + _SCANNED]
        if int(part.max()) >= vocab or int(part.min()) < 0:
            at = int(np.flatnonzero((part >= vocab) | (part < 0))[0])
            raise token_out_of_range(int(part[at]), start + at, vocab, str(file.path))

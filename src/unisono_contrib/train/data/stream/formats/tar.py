"""Tar shards as webdataset writes them: neighbours with one name up to its first dot are a sample, what is behind the
dot names the field (github.com/webdataset/webdataset). ustar, and long names of GNU and pax."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unisono.train.data.tokenised.chats import BadRecord
from unisono_contrib.train.data.stream.formats import PART, PartRecords, Place, ShardFormat
from unisono_contrib.train.data.stream.store import ShardReader

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)$")
_PAX = re.compile(rb"(\d+) (path|size)=")


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of an archive. at: its header, and what belongs to it before. body, size: its bytes. end: behind it."""

    at: int
    name: str
    body: int
    size: int
    end: int


def _members(
    read: Callable[[int, int], bytes], at: int, end: int
) -> Iterator[_Member | tuple[int, BadRecord]]:
    """The files between two bytes, and what is wrong; after a broken header it goes on with the next sound one."""
    first, name, size = at, "", -1
    while at + _BLOCK <= end:
        header = read(at, at + _BLOCK)
        if header == _ZEROS:
            at += _BLOCK
            first = at
            continue
        if not _is_sound(header):
            yield at, BadRecord("no header of a tar file")
            at += _BLOCK
            while at + _BLOCK <= end and not _is_sound(read(at, at + _BLOCK)):
                at += _BLOCK
            first, name, size = at, "", -1
            continue
        kind, here = header[156:157], _number(header[124:136]) if size < 0 else size
        body, stop = at + _BLOCK, at + _BLOCK + -(-here // _BLOCK) * _BLOCK
        if body + here > end:
            yield (
                first,
                BadRecord(f"it is cut off: {_named(header)} has {here:,} bytes, {end - body:,} are there"),
            )
            return
        at = min(stop, end)
        if kind in b"xL":
            text = read(body, body + here)
            if kind == b"L":
                name = _text(text.rstrip(b"\0"))
            else:
                name, size = _pax(text, name, size)
            continue
        if kind in (b"0", b"\0"):
            yield _Member(first, name or _named(header), body, here, at)
        if kind != b"g":
            first, name, size = at, "", -1
    if at < end:
        yield at, BadRecord("it is cut off within a header")


def _is_sound(header: bytes) -> bool:
    """Whether its sum is the one that it says."""
    said = header[148:156].strip(b" \0")
    try:
        return sum(header) - sum(header[148:156]) + 8 * 32 == int(said, 8)
    except ValueError:
        return False


def _number(field: bytes) -> int:
    """Octal digits, or, behind a high bit, binary."""
    return int.from_bytes(field[1:], "big") if field[0] & 0x80 else int(field.strip(b" \0") or b"0", 8)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _named(header: bytes) -> str:
    name, prefix = (header[a:b].partition(b"\0")[0] for a, b in ((0, 100), (345, 500)))
    is_posix = header[257:263] == b"ustar\0"
    return _text(prefix + b"/" + name if prefix and is_posix else name)


def _pax(text: bytes, name: str, size: int) -> tuple[str, int]:
    """What a pax header says of the next file, over what is known."""
    at = 0
    while at < len(text) and (length := int(text[at:].partition(b" ")[0] or b"0")):
        said = _PAX.match(text[at : at + length])
        if said is not None:
            value = text[at + said.end() : at + length - 1]
            name, size = (_text(value), size) if said[2] == b"path" else (name, int(value))
        at += length
    return name, size


class TarFormat(ShardFormat):
    """Samples of neighbouring files."""

    as_stored = True

    def cut(self, reader: ShardReader, extra: str) -> Iterator[range | Place]:
        first, key, last = 0, "", 0
        for member in _members(reader.read, 0, reader.size):
            if isinstance(member, tuple):
                continue  # `unpack` of the part that it lies in says it
            named = _NAME.match(member.name)
            if named is None:
                continue
            if named[1] != key and member.at - first >= PART:
                yield range(first, member.at)
                first = member.at
            key, last = named[1], member.end
        yield range(first, reader.size)
        if last and reader.read(reader.size - _BLOCK, reader.size) != _ZEROS:
            yield reader.size, BadRecord("it is cut off: a tar file ends with a block of zeros")

    def unpack(self, raw: bytes, start: int, extra: str) -> PartRecords:
        records: list[Place] = []
        fields: dict[str, slice] = {}
        last = ""
        for member in _members(lambda a, b: raw[a:b], 0, len(raw)):
            if isinstance(member, tuple):
                records.append((start + member[0], member[1]))
                last = ""
                continue
            named = _NAME.match(member.name)
            if named is None or named[1].rpartition("/")[2].startswith("__"):
                continue
            key, field = named[1], named[2].lower()
            if key != last:
                fields = {}
                records.append((start + member.at, fields))
                last = key
            elif field in fields:
                records[-1] = records[-1][0], BadRecord(f"{key} has two files .{field}")
            fields[field] = slice(member.body, member.body + member.size)
        return PartRecords(raw, records)


FORMAT = TarFormat()

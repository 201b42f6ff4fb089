"""What is read of a part: pictures with labels, or tokens. The same in the process that indexes and in the ranks. No
torch."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.tokenised.cutters import width_of
from unisono.train.data.tokenised.order import Part, TokenOrder
from unisono.train.data.tokenised.records import parsed
from unisono.train.data.tokenised.worker import Maker
from unisono_contrib.train.data.stream.formats import PartRecords, Record, format_of
from unisono_contrib.train.data.stream.store import ShardStore, changed

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "image", "img")
LABELS = ("cls", "label", "class", "labels")
TEXTS = ("txt", "text")


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wanted of samples, as JSON values.

    kind: "pictures" or "text". image, label: names of fields; those that are usual where "". skip_bad: leave bad
    samples out. order: how texts become tokens. window, several: see `packing`; whether windows hold several documents.
    """

    kind: str
    skip_bad: bool
    image: str = ""
    label: str = ""
    order: Mapping[str, Any] = field(default_factory=dict)
    window: int = 0
    several: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def token_order(self) -> TokenOrder:
        """How texts become tokens."""
        return TokenOrder.read(self.order)


@dataclass(frozen=True, slots=True)
class Picture:
    """Where the bytes of a picture stand in its part, and the number of its class."""

    span: slice
    label: int


def picture_of(body: bytes, record: Record, reading: Reading) -> Picture:
    """The picture of a sample. Raises BadRecord."""
    images = (reading.image,) if reading.image else IMAGES
    labels = (reading.label,) if reading.label else LABELS
    image = next((record[key] for key in images if isinstance(record.get(key), slice)), None)
    label = next((record[key] for key in labels if record.get(key) is not None), None)
    if image is None:
        raise BadRecord(_lacks(record, "picture", images))
    if label is None:
        raise BadRecord(_lacks(record, "class", labels))
    try:
        number = int(body[label]) if isinstance(label, slice) else int(label)
    except ValueError as error:
        raise BadRecord(f"its class is no number: {error}") from error
    if number < 0:
        raise BadRecord(f"its class is {number}, and classes count from 0")
    return Picture(image, number)


def _lacks(record: Record, what: str, keys: tuple[str, ...]) -> str:
    return f"it has no {what}: none of {', '.join(keys)}; its fields: {', '.join(map(str, record)) or 'none'}"


def texts_of(unpacked: PartRecords, text: str) -> Iterator[tuple[int, Any]]:
    """Records with text, as lines of JSON are. text: the key of a record's text."""
    for at, record in unpacked.records:
        if isinstance(record, BadRecord):
            yield at, record
            continue
        try:
            yield at, _worded(unpacked.body, record, text)
        except BadRecord as error:
            yield at, error


def _worded(body: bytes, record: Record, text: str) -> Record:
    """Files of a tar become a record: `.json` is one, `.txt` the text of one."""
    files = {key: value for key, value in record.items() if isinstance(value, slice)}
    if len(files) < len(record) or not record:
        return {key: value for key, value in record.items() if key not in files}
    if "json" in files:
        return parsed(body[files["json"]])
    chosen = next((files[key] for key in (text, *TEXTS) if key in files), None)
    if chosen is None:
        raise BadRecord(_lacks(record, "text", (*TEXTS, "json")))
    try:
        return {text: body[chosen].decode()}
    except UnicodeDecodeError as error:
        raise BadRecord(f"no UTF-8: {error.reason} at {error.start:,}") from error


@dataclass(frozen=True, slots=True)
class PartBytes:
    """A part of a shard as its index knows it. path, format, extra: of the shard. crc: of its bytes."""

    path: str
    format: str
    extra: str
    start: int
    stop: int
    crc: int

    def checked(self, store: ShardStore) -> bytes:
        """Its bytes in the shard. Raises UsageError D02, D03, D18, and D19 where they are others than those indexed."""
        raw = store.read(self.path, self.start, self.stop)
        if len(raw) != self.stop - self.start:
            raise changed(
                self.path, f"it ends at byte {self.start + len(raw):,}, within a part that was indexed"
            )
        if crc32(raw) != self.crc:
            raise changed(self.path, f"bytes {self.start:,} to {self.stop:,} are others")
        return raw

    def unpacked(self, raw: bytes) -> PartRecords:
        """Its samples."""
        return format_of(self.format).unpack(raw, self.start, self.extra)


class Tokeniser:
    """Makes tokens of parts. order: how. One may serve several threads."""

    def __init__(self, order: TokenOrder) -> None:
        self._maker: Maker | None = None
        self._order = order

    def put(self, unpacked: PartRecords, out: Path) -> Mapping[str, Any]:
        """Write the tokens of a part into a folder; what `Maker.make` says of them."""
        self._maker = self._maker or Maker(self._order)
        records = texts_of(unpacked, self._order.fields.text)
        summary = self._maker.make(Part("", 0, len(unpacked.body), 0), str(out / "part"), records)
        (out / "part.json").write_text(json.dumps(summary))
        return summary


@dataclass(frozen=True, slots=True)
class TokenPart:
    """tokens: [n]. ends: int64, behind each document. marks: uint8 [n], 1 for a token that counts as a target. summary:
    what `Maker.make` said of them."""

    tokens: np.ndarray
    ends: np.ndarray
    marks: np.ndarray
    summary: Mapping[str, Any]


def opened_tokens(tokenizer: str) -> Callable[[Path, bool], TokenPart]:
    """What opens a folder that `Tokeniser.put` has written."""
    width = width_of(tokenizer)

    def opened(folder: Path, stays: bool) -> TokenPart:
        return TokenPart(
            mapped(folder / "part.tokens", width, stays),
            mapped(folder / "part.ends", "<i8", stays),
            mapped(folder / "part.marks", "u1", stays),
            json.loads((folder / "part.json").read_text()),
        )

    return opened


def mapped(path: Path, kind: str, stays: bool) -> np.ndarray:
    """A file's numbers: mapped where the file stays, else in memory."""
    if not stays or not path.stat().st_size:
        return np.fromfile(path, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")

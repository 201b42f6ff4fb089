"""The index of shards: how many samples each part holds, and where.

Worker processes make it once per shard. It lies in the cache of data under what the shard is known by: a shard that is
new, or was written anew, is indexed alone.
"""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home
from unisono.train.data import cache
from unisono.train.data.pieces import filled
from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.tokenised.cutters import folder_of, width_of
from unisono.train.data.worker_pool import on_stderr, progress, served
from unisono_contrib.train.data.decoding import pixels_of
from unisono_contrib.train.data.host_secret import IndexLenders
from unisono_contrib.train.data.stream.formats import PartRecords, Place, ShardFile, format_of
from unisono_contrib.train.data.stream.parts import PartCache
from unisono_contrib.train.data.stream.reading import (
    PartBytes,
    Reading,
    Tokeniser,
    opened_tokens,
    picture_of,
)
from unisono_contrib.train.data.stream.store import ShardReader, ShardStore, damaged, is_remote

FORMAT = 1  # of what lies in the cache, and of how shards are cut into parts
KIND = "shard"
"""Of what the cache keeps."""
_WORKER = "unisono_contrib.train.data.stream.indexing"
_AT_ONCE = 16  # shards that one order names at most: their sizes are asked for together
_NAMED = 5  # bad samples of a shard that are named
_WITHIN = ("memory://",)  # stores that other processes do not see


@dataclass(frozen=True, slots=True)
class ShardPlaces:
    """Where things lie, and how they are reached. cache: the folder of prepared data. limit: bytes of parts in it.
    lenders: data hosts that may have an index."""

    store: ShardStore
    cache: str
    limit: int
    lenders: IndexLenders = field(default_factory=IndexLenders)

    @property
    def parts(self) -> PartCache:
        """The cache of parts."""
        return PartCache(at_home(self.cache) / "parts", self.limit)


@dataclass(frozen=True, slots=True)
class Index:
    """All shards. parts: int64 [parts, 4]: shard, first byte, byte behind, CRC-32. counts: int64 [parts], samples of
    pictures, or tokens. identities: of each shard, what the store said of it.

    spans: int64 [samples, 2], the bytes of each picture in its part. labels: int64 [samples].
    heads: the first window + 1 tokens of each part, one behind the other. windows: int64 [parts], windows of documents.
    sums: int64, targets of each window that count. masked: whether a record says which targets count.
    """

    shards: Sequence[ShardFile]
    identities: Sequence[Sequence[Any]]
    parts: np.ndarray
    counts: np.ndarray
    spans: np.ndarray
    labels: np.ndarray
    heads: np.ndarray
    windows: np.ndarray
    sums: np.ndarray
    masked: bool
    bad: Sequence[str]
    left_out: int

    def part(self, number: int) -> PartBytes:
        """What is to be read of a part."""
        shard, start, stop, crc = self.parts[number].tolist()
        about = self.shards[shard]
        return PartBytes(about.path, about.format, about.extra, start, stop, crc)

    def fingerprint(self) -> str:
        """16 hex digits of what the shards hold, wherever they lie."""
        digest = blake2b(digest_size=8)
        for array in (self.parts[:, 1:], self.counts, self.labels, self.windows, self.sums):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


_ARRAYS: Mapping[str, tuple[int, ...]] = {
    "parts": (-1, 3), "counts": (-1,), "spans": (-1, 2), "labels": (-1,), "windows": (-1,), "sums": (-1,),
}  # fmt: skip


def indexed(
    shards: Sequence[ShardFile], reading: Reading, places: ShardPlaces, workers: int | None = None
) -> Index:
    """The index of these shards, in this order. workers: processes; one a core where None. Raises UsageError, codes
    D02, D03, D10, D14 (a bad sample, unless they are left out), D15, D16, D18."""
    count, begun = workers or len(os.sched_getaffinity(0)), time.monotonic()
    step = max(1, min(_AT_ONCE, len(shards) // (8 * count)))
    jobs = [
        {
            "files": [shard.path for shard in shards[i : i + step]],
            "formats": [[shard.format, shard.extra] for shard in shards[i : i + step]],
            "reading": reading.as_json(), "patience": places.store.patience,
            "cache": places.cache, "limit": places.limit,
            "hosts": [*places.lenders.hosts], "secret": places.lenders.secret,
        }
        for i in range(0, len(shards), step)
    ]  # fmt: skip
    answers: dict[int, list[dict[str, Any]]] = {}

    def heard(at: int, answer: dict[str, Any]) -> bool:
        answers[at] = answer["shards"]
        done = sum(map(len, answers.values()))
        if any(each["is_new"] for each in answer["shards"]):
            line = progress("indexing", done, len(shards), "shards", time.monotonic() - begun)
            on_stderr(line + "\n" * (done == len(shards)))
        return True

    others = []
    for at, job in enumerate(jobs):
        paths = [shard.path for shard in shards[at * step : (at + 1) * step]]
        if any(path.startswith(_WITHIN) for path in paths) or _is_there(job):
            heard(at, index_job(job))
        else:
            others.append(at)
    if others:
        served(
            _WORKER, count, [jobs[at] for at in others], places.cache, lambda i, each: heard(others[i], each)
        )
    return _together([each for at in range(len(jobs)) for each in answers[at]], shards, reading)


def _together(answers: Sequence[Mapping[str, Any]], shards: Sequence[ShardFile], reading: Reading) -> Index:
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
    heads: list[np.ndarray] = []
    for number, answer in enumerate(answers):
        folder = Path(answer["folder"])
        for name, shape in _ARRAYS.items():
            array = np.fromfile(folder / name, dtype=np.int64).reshape(shape)
            if name == "parts":
                array = np.concatenate((np.full((len(array), 1), number), array), axis=1)
            arrays[name].append(array)
        if reading.kind == "text":
            heads.append(np.fromfile(folder / "heads", dtype=width_of(reading.token_order.tokenizer)))
    return Index(
        [replace(shard, extra=answer["extra"]) for shard, answer in zip(shards, answers, strict=True)],
        [answer["identity"] for answer in answers],
        **{name: np.concatenate(each) for name, each in arrays.items()},
        heads=np.concatenate(heads) if heads else np.zeros(0, np.uint8),
        masked=any(answer["masked"] for answer in answers),
        bad=[
            f"{shard.path}:{at}: {why}"
            for shard, answer in zip(shards, answers, strict=True)
            for at, why in answer["bad"]
        ],
        left_out=sum(answer["left_out"] for answer in answers),
    )


def _read_job(job: Mapping[str, Any]) -> tuple[list[ShardFile], Reading, ShardPlaces]:
    shards = [ShardFile(path, *about) for path, about in zip(job["files"], job["formats"], strict=True)]
    return (
        shards,
        Reading(**job["reading"]),
        ShardPlaces(
            ShardStore(job["patience"]), job["cache"], job["limit"], IndexLenders(job["hosts"], job["secret"])
        ),
    )


def _is_there(job: Mapping[str, Any]) -> bool:
    """Whether all its shards lie here and were indexed before, so that no process is needed."""
    shards, reading, places = _read_job(job)
    return not any(is_remote(shard.path) for shard in shards) and all(
        (
            cache.folder_of(places.cache, KIND, _key(s, places.store.identity(s.path), reading)) / cache.META
        ).exists()
        for s in shards
    )


def index_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Index some shards, or find them indexed: of each, where its index lies and what is in it."""
    shards, reading, places = _read_job(job)
    if not any(is_remote(shard.path) for shard in shards):  # no thread: a fork may follow
        identities = [places.store.identity(shard.path) for shard in shards]
        return {"shards": [_of_shard(s, i, reading, places) for s, i in zip(shards, identities, strict=True)]}
    with ThreadPoolExecutor(len(shards)) as pool:
        identities = list(pool.map(lambda shard: places.store.identity(shard.path), shards))
    return {"shards": [_of_shard(s, i, reading, places) for s, i in zip(shards, identities, strict=True)]}


def _of_shard(shard: ShardFile, identity: list[Any], reading: Reading, places: ShardPlaces) -> dict[str, Any]:
    written, key = [], _key(shard, identity, reading)

    def make(out: Path) -> Mapping[str, Any]:
        if (lent := places.lenders.lend(key, out)) is not None:
            return lent
        written.append(True)
        return _ShardIndexer(shard, identity, reading, places).write(out)

    wait = f"another process is indexing {shard.path}: waiting\n"
    folder, meta = cache.kept(places.cache, KIND, key, make, lambda: on_stderr(wait))
    return {**meta, "folder": str(folder), "identity": identity, "is_new": bool(written)}


def _key(shard: ShardFile, identity: Sequence[Any], reading: Reading) -> dict[str, Any]:
    """What decides the index of a shard."""
    path = shard.path if is_remote(shard.path) else os.path.abspath(shard.path)
    return {
        "format": FORMAT, "shard": [path, *identity, shard.format, shard.extra], "reading": reading.as_json(),
        "tokenizer": tokenizer_digest(reading),
    }  # fmt: skip


def tokenizer_digest(reading: Reading) -> str:
    """What decides the tokens of a tokenizer that is a folder."""
    folder = folder_of(reading.token_order.tokenizer) if reading.kind == "text" else None
    return folder.digest if folder is not None else ""


def part_name(part: PartBytes, reading: Reading) -> str:
    """The name of a part in the cache: what went in."""
    said = (part.path, part.format, part.start, part.stop, part.crc, reading.kind, reading.order)
    digest = blake2b(f"{FORMAT}{said}{tokenizer_digest(reading)}".encode(), digest_size=12)
    return digest.hexdigest()


class _ShardIndexer:
    """Reads a shard from its beginning to its end."""

    def __init__(self, shard: ShardFile, identity: list[Any], reading: Reading, places: ShardPlaces) -> None:
        self._shard, self._reading, self._places, self._cache = shard, reading, places, places.parts
        self._reader = ShardReader(places.store, shard.path, int(identity[0]))
        self._format = format_of(shard.format)
        self._tokeniser = Tokeniser(reading.token_order) if reading.kind == "text" else None
        self._bad: list[tuple[int, str]] = []
        self._left_out, self._masked = 0, False
        self._rows: dict[str, list[Any]] = {name: [] for name in (*_ARRAYS, "heads")}

    def write(self, out: Path) -> Mapping[str, Any]:
        """Write the index; what else is to be known of it."""
        extra = self._format.about(self._reader, self._shard)
        for cut in self._format.cut(self._reader, extra):
            if not isinstance(cut, range):
                self._refuse([cut])
                continue
            raw = self._reader.read(cut.start, cut.stop)
            part = PartBytes(self._shard.path, self._shard.format, extra, cut.start, cut.stop, crc32(raw))
            self._rows["parts"].append((cut.start, cut.stop, part.crc))
            unpacked = self._format.unpack(raw, cut.start, extra)
            self._texts(part, unpacked) if self._tokeniser else self._pictures(part, unpacked)
        for name in _ARRAYS:
            np.array(self._rows[name], dtype=np.int64).tofile(out / name)
        if self._tokeniser:
            width = width_of(self._reading.token_order.tokenizer)
            np.concatenate([np.zeros(0, width), *self._rows["heads"]]).astype(width).tofile(out / "heads")
        bad = sorted(self._bad)[:_NAMED]
        return {"extra": extra, "bad": bad, "left_out": self._left_out, "masked": self._masked}

    def _refuse(self, bad: Sequence[Place]) -> None:
        for at, why in bad:
            if not self._reading.skip_bad:
                raise damaged(self._shard.path, at, str(why))
            self._bad.append((at, str(why)))
            self._left_out += 1

    def _pictures(self, part: PartBytes, unpacked: PartRecords) -> None:
        count = 0
        for at, record in unpacked.records:
            try:
                if isinstance(record, BadRecord):
                    raise record
                picture = picture_of(unpacked.body, record, self._reading)
                if self._reading.skip_bad:  # else it is said when it is read: to decode takes long
                    _check(unpacked.body[picture.span])
            except BadRecord as error:
                self._refuse([(at, error)])
                continue
            self._rows["spans"].append((picture.span.start, picture.span.stop))
            self._rows["labels"].append(picture.label)
            count += 1
        self._rows["counts"].append(count)

    def _texts(self, part: PartBytes, unpacked: PartRecords) -> None:
        """Tokens stay in the cache, as far as there is room: a small data set is tokenised once."""
        reading = self._reading
        tokeniser = self._tokeniser or Tokeniser(reading.token_order)

        def make(folder: Path) -> None:
            summary = tokeniser.put(unpacked, folder)
            if summary["bad"] and not reading.skip_bad:
                at, why = summary["bad"][0]
                raise damaged(part.path, at, why)

        opened = opened_tokens(reading.token_order.tokenizer)
        tokens = self._cache.kept(part_name(part, reading), make, opened)
        summary = tokens.summary
        self._refuse([(at, BadRecord(why)) for at, why in summary["bad"]])
        self._left_out += summary["left_out"] - len(summary["bad"])
        self._masked |= summary["masked"]
        marks = tokens.marks if summary["masked"] else None
        documents = range(len(tokens.ends))
        *_, begins, sums, _ = filled(tokens.ends, marks, reading.window, reading.several, documents)
        self._rows["counts"].append(len(tokens.tokens))
        self._rows["heads"].append(np.array(tokens.tokens[: reading.window + 1]))
        self._rows["windows"].append(len(begins) - 1)
        self._rows["sums"] += sums.tolist()


def _check(body: bytes) -> None:
    """Raises BadRecord where no picture can be decoded."""
    try:
        pixels_of(BytesIO(body), (3, 1, 1))
    except UsageError:
        raise
    except Exception as error:  # a decoder may refuse a broken file in any way that it likes
        raise BadRecord(f"{type(error).__name__}: {error}") from error

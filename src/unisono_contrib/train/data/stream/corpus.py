"""From shards to a corpus."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.train.data.dataset import Corpus, require_samples
from unisono.train.data.load import check_vocab
from unisono.train.data.packing import PackedWindows
from unisono.train.data.texts import packing_of, text_of
from unisono.train.data.tokenised.cutters import folder_of
from unisono.train.data.tokenised.order import JSONL, Fields, TokenOrder
from unisono_contrib.comm.depot import bare
from unisono_contrib.train.data.host_secret import IndexLenders, secret_path
from unisono_contrib.train.data.stream.crew import PictureDecoder, WorkerCrew
from unisono_contrib.train.data.stream.datasets import Body, DocumentStream, PictureStream, TokenStream
from unisono_contrib.train.data.stream.decode import Decoding
from unisono_contrib.train.data.stream.formats import ShardFile, format_of, shards_of
from unisono_contrib.train.data.stream.index import Index, ShardPlaces, indexed, part_name
from unisono_contrib.train.data.stream.order import WINDOW
from unisono_contrib.train.data.stream.parts import PartCache, PartReader
from unisono_contrib.train.data.stream.reading import Reading, Tokeniser, TokenPart, opened_tokens
from unisono_contrib.train.data.stream.store import ShardStore, is_remote

_THREADS = 8  # that read ahead: while one request is waited for, others are on their way
_HELD = 3 * WINDOW  # parts that a process holds open
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Streaming:
    """How shards are streamed. patience: seconds until a failing request is given up. cache_gb: GiB on this disk."""

    patience: float = 60.0
    cache_gb: float = 16.0

    def places(self, data: DataConfig) -> ShardPlaces:
        """Where things lie."""
        lenders = IndexLenders(data.hosts, secret_path(data))
        return ShardPlaces(ShardStore(self.patience), data.cache, int(self.cache_gb * _GIB), lenders)


def text_stream(
    shards: Sequence[ShardFile],
    origin: str,
    fields: Fields,
    data: DataConfig,
    model: ModelConfig,
    how: Streaming,
) -> Corpus:
    """The texts of shards as windows of tokens. The last of the tokens, or of the windows of documents, are held out.
    Raises UsageError."""
    if data.tokenizer != "byte" and not data.tokenizer.startswith("hf:"):
        raise UsageError(
            f"the tokenizer {data.tokenizer!r} numbers the characters of all texts, and shards are read one by one",
            code="D11", where="data.tokenizer", fix='"byte" or "hf:FOLDER"',
        )  # fmt: skip
    order = TokenOrder(JSONL, data.tokenizer, fields, data.separator, data.answers_only, data.skip_bad)
    several = data.packing != "none" and model.packs
    reading = Reading("text", data.skip_bad, order=order.as_json(), window=model.window, several=several)
    places = how.places(data)
    index = indexed(shards, reading, places, data.workers)
    packing = packing_of(data, model, index.masked)
    folder = folder_of(data.tokenizer)
    vocab = folder.vocab if folder else 256
    check_vocab(model, vocab)
    opened = partial(_tokens, index, reading, places, places.parts, _crew(data) or Tokeniser(order))
    if packing == "stream":
        train, val = _streams(index, PartReader(opened, _THREADS, _HELD), data, model)
    else:
        several = packing == "documents"
        train, val = _documents(index, opened, data, model, several)
    require_samples(len(train), 1, origin, f"more than {model.window + 1} tokens, or a smaller model.context")
    text = text_of(data.tokenizer, np.zeros(0, np.uint8), vocab)
    return Corpus(
        train, val, vocab, vocab, (model.window,), text.decode, text.encode, index.fingerprint(), origin,
        notes=_notes(index, origin),
    )  # fmt: skip


def lines_stream(
    pattern: str, endings: Sequence[str], fields: Fields, data: DataConfig, model: ModelConfig, how: Streaming
) -> Corpus:
    """Lines of JSON in shards, also compressed, as `text_stream` says."""
    every = [ending + more for ending in endings for more in ("", ".gz", ".zst")]
    shards = shards_of(how.places(data).store, pattern, "jsonl", every)
    return text_stream(shards, f"jsonl:{pattern}", fields, data, model, how)


def _streams(
    index: Index, parts: PartReader[TokenPart], data: DataConfig, model: ModelConfig
) -> tuple[TokenStream, TokenStream]:
    total = int(index.counts.sum())
    cut = total - int(total * data.val_fraction)
    train, val = (
        TokenStream.of(index, parts, span, model.window) for span in (range(cut), range(cut, total))
    )
    return train, val


def _documents(
    index: Index, opened: "partial[TokenPart]", data: DataConfig, model: ModelConfig, several: bool
) -> tuple[DocumentStream, DocumentStream]:
    def packed(number: int) -> PackedWindows:
        part = opened(number)
        marks = part.marks if index.masked else None
        documents = range(len(part.ends))
        return PackedWindows.of(part.tokens, part.ends, marks, model.window, several, documents)[0]

    total = int(index.windows.sum())
    cut = total - int(total * data.val_fraction)
    parts = PartReader(packed, _THREADS, _HELD)
    train, val = (DocumentStream.of(index, parts, span, several) for span in (range(cut), range(cut, total)))
    return train, val


def _tokens(
    index: Index,
    reading: Reading,
    places: ShardPlaces,
    cache: PartCache,
    by: Tokeniser | WorkerCrew,
    number: int,
) -> TokenPart:
    """A part's tokens, from the cache if they were made before, here or by a process."""
    part = index.part(number)

    def make(out: Path) -> None:
        raw = part.checked(places.store)
        if isinstance(by, Tokeniser):
            by.put(part.unpacked(raw), out)
            return
        order = {
            "reading": reading.as_json(),
            "format": part.format,
            "start": part.start,
            "extra": part.extra,
        }
        by.call({**order, "out": str(out), "files": [f"{bare(part.path)}:{part.start}"]}, raw, str(out))

    return cache.kept(part_name(part, reading), make, opened_tokens(reading.token_order.tokenizer))


def picture_stream(
    shards: Sequence[ShardFile],
    origin: str,
    fields: tuple[str, str],
    shape: tuple[int, ...],
    classes: int | None,
    data: DataConfig,
    how: Streaming,
) -> Corpus:
    """The pictures of shards in this shape. fields: names of picture and class, the usual ones where "". The last
    of them are held out. Raises UsageError."""
    decoding = Decoding(tuple(shape), data.transform)
    decoding.check()
    image, label = fields
    reading = Reading("pictures", data.skip_bad, image, label)
    places = how.places(data)
    index = indexed(shards, reading, places, data.workers)
    total = len(index.labels)
    require_samples(total, 1, origin)
    highest = int(index.labels.max()) + 1
    if classes is not None and highest > classes:
        raise UsageError(
            f"a sample is of class {highest - 1}, and there are {classes}, counted from 0",
            code="D12", where="data.source, model.classes", fix=f"{highest} classes, or none named",
        )  # fmt: skip
    cut = total - int(total * data.val_fraction)
    parts = PartReader(partial(_body, index, reading, places, places.parts), _THREADS, _HELD)
    decoder = PictureDecoder(decoding, _workers(data), _crew(data))
    train = PictureStream.of(index, parts, range(cut), decoder, varies=True)
    val = PictureStream.of(index, parts, range(cut, total), decoder, varies=False)
    return Corpus(
        train, val, None, classes or highest, tuple(shape), None, None, index.fingerprint(), origin,
        notes=_notes(index, origin),
    )  # fmt: skip


def _workers(data: DataConfig) -> int:
    return data.workers or min(4, len(os.sched_getaffinity(0)))


def _crew(data: DataConfig) -> WorkerCrew | None:
    """The processes that prepare samples; None where threads do."""
    return WorkerCrew(_workers(data)) if data.worker_kind == "processes" else None


def _notes(index: Index, origin: str) -> tuple[str, ...]:
    if not index.left_out:
        return ()
    return (f"{index.left_out:,} bad samples of {origin} were left out, the first {index.bad[0]}",)


def _body(index: Index, reading: Reading, places: ShardPlaces, cache: PartCache, number: int) -> Body:
    """The bytes of a part: of a local shard where they stand, else a copy in the cache."""
    part = index.part(number)
    if not is_remote(part.path) and format_of(part.format).as_stored:
        identity, read = index.identities[index.parts[number, 0]], places.store.read_unchanged
        return lambda first, end: read(part.path, identity, part.start + first, part.start + end)

    def opened(folder: Path, stays: bool) -> Body:
        body = np.memmap(folder / "body", np.uint8, "r") if stays else np.fromfile(folder / "body", np.uint8)
        return lambda first, end: body[first:end].tobytes()

    def make(out: Path) -> None:
        (out / "body").write_bytes(part.unpacked(part.checked(places.store)).body)

    return cache.kept(part_name(part, reading), make, opened)


def picture_shape(model: ModelConfig, size: int) -> tuple[int, ...]:
    """[C, H, W]: the model's, or square pictures of this size in colour."""
    shape = model.sized(Facts()).sample_shape
    return shape if shape is not None and len(shape) == 3 else (3, size, size)

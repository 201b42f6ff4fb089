"""From `[data]` of a recipe to a corpus, and what the sources share for it."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import SOURCES
from unisono.train.data import documents, tokens
from unisono.train.data.blend import Blend, shared_out
from unisono.train.data.dataset import Corpus, TokenWindows, require_samples

_PAGES, _PAGE = 256, 4096  # how much of a memory-mapped file is read for its fingerprint


def load(data: DataConfig, model: ModelConfig) -> Corpus:
    """Opens the source, splits it and numbers its samples. Starts no thread, so that a fork may follow.

    Raises UsageError, codes C06 (unknown source), D02 (missing), D03 (unreadable), D04 (empty), D05 (too small),
    D06 (not text), D07 (odd length), D08 (vocabulary), D09 (token out of range), D10 (extra missing),
    D11 (tokenizer), D12 (source and model do not fit), D13 (broken index), D14 (bad record), D15 (cache), D16 (worker),
    D17 (packing), D18 (a store that does not answer), D20 (data hosts).
    """
    corpus = _loaded(data, model)
    if model.samples:
        corpus = contributed(f"unisono.train.data.{model.samples}").prepared(model, corpus)
    return contributed("unisono.train.data.hosts").hosted(corpus, data) if data.hosts else corpus


def _loaded(data: DataConfig, model: ModelConfig) -> Corpus:
    source = SOURCES.read(data.source, "data.source")
    if model.reads not in ("", source.gives):  # a user's own model may read what it likes
        raise UsageError(
            f"a model of kind {model.kind!r} reads {model.reads}, the source {data.source!r} gives {source.gives}",
            code="D12",
            where="data.source",
            fix=", or ".join(
                filter(None, (source.giving(model.reads), "another data.source, or another model.kind"))
            ),
        )
    if data.transform and not source.transforms:
        raise UsageError(
            f"data.transform is called for pictures in shards, and the source {data.source!r} has none",
            code="C06",
            where="data.transform",
            fix="without it; or tar:, mds:, parquet:...,kind=pictures",
        )
    return source.load(data, model)


def mixed(weighed: Sequence[tuple[float, str]], data: DataConfig, model: ModelConfig) -> Corpus:
    """The corpus of several sources, each with its weight. Raises UsageError D12 where they do not go together."""
    parts = [_loaded(data.model_copy(update={"source": text}), model) for _, text in weighed]
    first, texts, weights = parts[0], [text for _, text in weighed], [weight for weight, _ in weighed]
    for part, text in zip(parts, texts, strict=True):
        if (part.vocab, part.sample_shape, part.rows) != (first.vocab, first.sample_shape, first.rows):
            raise UsageError(
                f"{text} has {part.vocab} tokens and samples of {part.sample_shape}, {texts[0]} has {first.vocab} and"
                f" {first.sample_shape}",
                code="D12",
                where="data.source",
                fix="sources of the same kind, under one tokenizer",
            )
    counts = shared_out(weights)
    train = Blend([part.train for part in parts], counts)
    held = [(part.val, count) for part, count in zip(parts, counts, strict=True) if len(part.val)]
    val = Blend([part for part, _ in held], shared_out([count for _, count in held])) if held else first.val
    each = ", ".join(
        f"{n} of {text} ({len(part.train):,} samples)"
        for n, text, part in zip(counts, texts, parts, strict=True)
    )
    return replace(
        first,
        train=train,
        val=val,
        fingerprint=fingerprint(
            np.array([*(int(part.fingerprint, 16) for part in parts)], np.uint64), np.array(counts)
        ),
        origin="mixture",
        notes=(*(note for part in parts for note in part.notes), f"of every 1000 samples, {each}"),
        shares=lambda seed, count: dict(zip(texts, train.shares(seed, count), strict=True)),
    )


def in_memory(data: DataConfig) -> bool:
    """Whether a text becomes tokens in no time and is cut anywhere, so that no cache is needed."""
    return data.tokenizer in ("byte", "char") and data.packing in ("auto", "stream") and not data.separator


def check_vocab(model: ModelConfig, tokens: int) -> None:
    """Raises UsageError D08 where the model has room for fewer different tokens than the data has."""
    vocab = model.sized(Facts()).vocab
    if vocab is not None and vocab < tokens:
        raise UsageError(
            f"model.vocab is {vocab}, the data has {tokens} different tokens",
            code="D08",
            where="model.vocab",
            fix="leave model.vocab out: it follows from the data",
        )


def text_corpus(
    texts: Sequence[documents.Document], origin: str, data: DataConfig, model: ModelConfig
) -> Corpus:
    """The corpus of documents as bytes or characters; the last of the tokens are held out."""
    text = tokens.as_bytes(texts) if data.tokenizer == "byte" else tokens.as_characters(texts)
    check_vocab(model, text.vocab)
    cut = len(text.tokens) - int(len(text.tokens) * data.val_fraction)
    return corpus_of(text.tokens, cut, origin, model, text.vocab, text=text)


def corpus_of(
    line: np.ndarray,
    cut: int,
    origin: str,
    model: ModelConfig,
    vocab: int,
    *,
    text: tokens.Tokenized | None = None,
    others: tuple[np.ndarray, str] | None = None,
    mapped: bool = False,
    sampled: bool = False,
) -> Corpus:
    """Windows over one line of tokens, those from `cut` on held out. others: a line of its own that is held out, and
    its origin. mapped: a file of others, of which each token is checked as it is read. sampled: the fingerprint is of
    some pages alone, as of such a file."""
    window, guard = model.window, vocab if mapped else None
    held, held_origin = others or (line[cut:], origin)
    train = TokenWindows(line[:cut], window, guard, origin)
    val = TokenWindows(held, window, guard, held_origin, first=0 if others else cut)
    what = "a file" if mapped else "a text"
    require_samples(
        len(train), 1, origin, f"{what} of more than {window + 1} tokens, or a smaller model.context"
    )
    parts = (line, held) if others else (line,)
    return Corpus(
        train=train,
        val=val,
        vocab=vocab,
        classes=vocab,
        sample_shape=(window,),
        decode=text.decode if text else None,
        encode=text.encode if text else None,
        fingerprint=fingerprint(*parts, whole=not (mapped or sampled)),
        origin=origin,
    )


def fingerprint(*arrays: np.ndarray, whole: bool = True) -> str:
    """16 hex digits of the arrays; of a large mapped file, of its length and of pages spread over it."""
    digest = blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if whole or flat.nbytes <= _PAGES * _PAGE:
            digest.update(flat.data)
        else:
            for start in np.linspace(0, flat.nbytes - _PAGE, _PAGES).astype(np.int64):
                digest.update(flat[start : start + _PAGE].data)
    return digest.hexdigest()

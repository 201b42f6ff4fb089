"""From `[data]` of a recipe to a corpus, and what the sources share for it."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import SOURCES
from unisono.train.data import documents, tokens
from unisono.train.data.dataset import Corpus, TokenWindows, require_samples

_PAGES, _PAGE = 256, 4096  # how much of a memory-mapped file is read for its fingerprint


def load(data: DataConfig, model: ModelConfig) -> Corpus:
    """Opens the source, splits it and numbers its samples. Starts no thread, so that a fork may follow.

    Raises UsageError, codes C06 (unknown source), D02 (missing), D03 (unreadable), D04 (empty), D05 (too small),
    D06 (not text), D07 (odd length), D08 (vocabulary), D09 (token out of range), D10 (extra missing),
    D11 (tokenizer), D12 (source and model do not fit), D13 (broken index).
    """
    source = SOURCES.read(data.source, "data.source")
    if model.reads not in ("", source.gives):  # a user's own model may read what it likes
        raise UsageError(
            f"a model of kind {model.kind!r} reads {model.reads}, the source {data.source!r} gives {source.gives}",
            code="D12",
            where="data.source",
            fix="another data.source, or another model.kind",
        )
    return source.load(data, model)


def text_corpus(
    texts: Sequence[documents.Document], origin: str, data: DataConfig, model: ModelConfig
) -> Corpus:
    """The corpus of documents as the recipe's tokenizer cuts them; the last of the tokens are held out."""
    if data.tokenizer not in ("byte", "char"):
        raise UsageError(
            f"the tokenizer {data.tokenizer!r} is not in this version",
            code="D11",
            where="data.tokenizer",
            fix='"byte" or "char"',
        )
    text = tokens.as_bytes(texts) if data.tokenizer == "byte" else tokens.as_characters(texts)
    vocab = model.sized(Facts()).vocab
    if vocab is not None and vocab < text.vocab:
        raise UsageError(
            f"model.vocab is {vocab}, the data has {text.vocab} different tokens",
            code="D08",
            where="model.vocab",
            fix="leave model.vocab out: it follows from the data",
        )
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
) -> Corpus:
    """Windows over one line of tokens, those from `cut` on held out. others: a line of its own that is held out, and
    its origin. mapped: a file of others, of which each token is checked as it is read."""
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
        fingerprint=fingerprint(*parts, whole=not mapped),
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

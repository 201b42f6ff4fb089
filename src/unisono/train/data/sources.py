"""From `[data]` of a recipe to a corpus."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from unisono.config import DataConfig, ModelConfig
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts
from unisono.train.data import binary, documents, tokens
from unisono.train.data.dataset import Corpus, TokenWindows, require_samples
from unisono.train.data.digits import digits

_PAGES, _PAGE = 256, 4096  # how much of a memory-mapped file is read for its fingerprint


def load(data: DataConfig, model: ModelConfig) -> Corpus:
    """Opens the source, splits it and numbers its samples. Starts no thread, so that a fork may follow.

    Raises UsageError, codes D02 (missing), D03 (unreadable), D04 (empty), D05 (too small), D06 (not text),
    D07 (odd length), D08 (vocabulary), D09 (token out of range), D10 (extra missing), D11 (unknown),
    D12 (source and model do not fit), D13 (broken index).
    """
    scheme, _, path = data.source.partition(":")
    images = data.source == "digits"
    if model.reads not in ("", "pictures" if images else "tokens"):
        raise UsageError(
            f"a model of kind {model.kind!r} cannot read the source {data.source!r}",
            code="D12",
            where="data.source",
            fix='data.source = "digits"' if model.reads == "pictures" else 'model.kind = "convnet" or "mlp"',
        )
    if images:
        return _load_digits(data)
    if scheme == "bin":
        return _load_binary(path, data, model)
    if scheme == "text":
        return _load_text(documents.text(path), path, data, model)
    if data.source == "stdlib":
        return _load_text(documents.stdlib(), "stdlib", data, model)
    raise UsageError(
        f"hf: sources are not yet in this version ({data.source})"
        if scheme == "hf"
        else f"unknown source {data.source!r}",
        code="D11",
        where="data.source",
        fix="stdlib, digits, text:PATH or bin:PATH",
    )


def _load_digits(data: DataConfig) -> Corpus:
    train, val = digits(data.val_fraction)
    return Corpus(
        train=train,
        val=val,
        vocab=None,
        classes=10,
        sample_shape=(1, 8, 8),
        decode=None,
        encode=None,
        fingerprint=_fingerprint(train.inputs.numpy(), train.targets.numpy()),
        origin="digits",
    )


def _load_text(
    found: Sequence[documents.Document], origin: str, data: DataConfig, model: ModelConfig
) -> Corpus:
    if data.tokenizer not in ("byte", "char"):
        raise UsageError(
            f"the tokenizer {data.tokenizer!r} is not in this version",
            code="D11",
            where="data.tokenizer",
            fix='"byte" or "char"',
        )
    text = tokens.as_bytes(found) if data.tokenizer == "byte" else tokens.as_characters(found)
    vocab = model.sized(Facts()).vocab
    if vocab is not None and vocab < text.vocab:
        raise UsageError(
            f"model.vocab is {vocab}, the data has {text.vocab} different tokens",
            code="D08",
            where="model.vocab",
            fix="leave model.vocab out: it follows from the data",
        )
    line = text.tokens
    cut = len(line) - int(len(line) * data.val_fraction)
    train = TokenWindows(line[:cut], model.window, origin=origin)
    val = TokenWindows(line[cut:], model.window, origin=origin, first=cut)
    require_samples(
        len(train), 1, origin, f"a text of more than {model.window + 1} tokens, or a smaller model.context"
    )
    return Corpus(
        train=train,
        val=val,
        vocab=text.vocab,
        classes=text.vocab,
        sample_shape=(model.window,),
        decode=text.decode,
        encode=text.encode,
        fingerprint=_fingerprint(line),
        origin=origin,
    )


def _load_binary(path: str, data: DataConfig, model: ModelConfig) -> Corpus:
    if data.tokenizer != "byte":  # the default; anything else was written by hand and would be ignored
        raise UsageError(
            f"a token file needs no tokenizer, and {data.tokenizer!r} is given",
            code="D11",
            where="data.tokenizer",
            fix="leave data.tokenizer out",
        )
    file, held_out = binary.open_tokens(path)
    vocab = model.sized(Facts()).vocab
    if vocab is None:
        raise UsageError(
            "a token file does not say how large its vocabulary is",
            code="D08",
            where="model.vocab",
            fix=f"model.vocab = {max(int(file.tokens[: 1 << 22].max()) + 1, 1)} or more (GPT-2: 50257)",
        )
    for part in (file, held_out):
        if part is not None:
            binary.check_tokens(part, vocab)
    origin = str(file.path)
    if held_out is None:
        cut = len(file.tokens) - int(len(file.tokens) * data.val_fraction)
        val = TokenWindows(file.tokens[cut:], model.window, vocab, origin, first=cut)
    else:
        cut = len(file.tokens)
        val = TokenWindows(held_out.tokens, model.window, vocab, str(held_out.path))
    train = TokenWindows(file.tokens[:cut], model.window, vocab, origin)
    require_samples(
        len(train), 1, origin, f"a file of more than {model.window + 1} tokens, or a smaller model.context"
    )
    return Corpus(
        train=train,
        val=val,
        vocab=vocab,
        classes=vocab,
        sample_shape=(model.window,),
        decode=None,
        encode=None,
        fingerprint=_fingerprint(
            *(part.tokens for part in (file, held_out) if part is not None), whole=False
        ),
        origin=origin,
    )


def _fingerprint(*arrays: np.ndarray, whole: bool = True) -> str:
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

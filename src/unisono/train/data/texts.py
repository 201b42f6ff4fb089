"""From tokens in the cache to a corpus: one line that is cut anywhere, or windows of whole documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.model import ModelConfig
from unisono.train.data.dataset import Corpus, require_samples
from unisono.train.data.load import check_vocab, corpus_of, fingerprint
from unisono.train.data.packing import packed_windows
from unisono.train.data.tokenised.build import Tokens, tokenised
from unisono.train.data.tokenised.cutters import NUL, folder_of
from unisono.train.data.tokenised.order import Fields, TokenOrder
from unisono.train.data.tokens import Tokenized


def token_corpus(
    kind: str,
    places: Sequence[str],
    origin: str,
    data: DataConfig,
    model: ModelConfig,
    fields: Fields | None = None,
    split: str = "train",
) -> Corpus:
    """The corpus of these places' records. kind: how they are read. Raises UsageError."""
    if data.tokenizer not in ("byte", "char") and not data.tokenizer.startswith("hf:"):
        raise UsageError(
            f"the tokenizer {data.tokenizer!r} is not in this version",
            code="D11",
            where="data.tokenizer",
            fix='"byte", "char" or "hf:FOLDER"',
        )
    order = TokenOrder(
        kind, data.tokenizer, fields or Fields(), data.separator, data.answers_only, data.skip_bad, split
    )
    tokens = tokenised(order, places, data.cache, data.workers)
    check_vocab(model, tokens.vocab)
    packing = packing_of(data, model, tokens.marks is not None)
    text = text_of(data.tokenizer, tokens.tokens, tokens.vocab, tokens.letters)
    corpus = _stream(tokens, origin, data, model, text) if packing == "stream" else _windows(
        tokens, origin, data, model, text, packing == "documents"
    )  # fmt: skip
    notes = [f"{tokens.left_out:,} bad records of {origin} were left out"] if tokens.left_out else []
    return replace(corpus, notes=(*notes, *tokens.notes, *corpus.notes))


def packing_of(data: DataConfig, model: ModelConfig, masked: bool) -> str:
    """How documents become windows. masked: whether a record says which targets count. Raises UsageError D17 where that
    is not possible."""
    if data.packing == "auto":
        whole = "documents" if model.packs else "none"
        return whole if masked else "stream"
    if data.packing == "stream" and masked:
        raise UsageError(
            "a stream of tokens cuts through documents, and here only the answers of chats count",
            code="D17",
            where="data.packing",
            fix='data.packing = "documents", or data.answers_only = false',
        )
    if data.packing == "documents" and not model.packs:
        raise UsageError(
            f"a model of kind {model.kind} does not keep attention inside documents",
            code="D17",
            where="data.packing, model.kind",
            fix='data.packing = "none", which pads each document to a window, or model.kind = "gpt"',
        )
    return data.packing


def _stream(tokens: Tokens, origin: str, data: DataConfig, model: ModelConfig, text: Tokenized) -> Corpus:
    cut = len(tokens.tokens) - int(len(tokens.tokens) * data.val_fraction)
    return corpus_of(tokens.tokens, cut, origin, model, tokens.vocab, text=text, sampled=True)


def _windows(
    tokens: Tokens, origin: str, data: DataConfig, model: ModelConfig, text: Tokenized, several: bool
) -> Corpus:
    """The last of the documents are held out."""
    count = len(tokens.ends)
    cut = count - int(count * data.val_fraction)
    parts = [
        packed_windows(tokens, data.cache, model.window, several, span)
        for span in (range(cut), range(cut, count))
    ]
    (train, without), (val, more) = parts
    require_samples(len(train), 1, origin, "records with at least two tokens, of which one counts")
    full = train.pieces.size.sum() / (len(train) * model.window)
    notes = [f"{cut:,} documents lie in {len(train):,} windows, which are {full:.0%} full"]
    if without + more:
        notes.append(
            f"{without + more:,} stretches of a window's length have no answer in them and were left out"
        )
    folder = folder_of(data.tokenizer)
    if tokens.marks is not None and folder is not None and not folder.templated():
        notes.append(
            f"{data.tokenizer} has no chat template: of a chat, each message is a line, role: content"
        )
    hashed = [tokens.tokens, tokens.ends, *([] if tokens.marks is None else [tokens.marks])]
    return Corpus(
        train=train,
        val=val,
        vocab=tokens.vocab,
        classes=tokens.vocab,
        sample_shape=(model.window,),
        decode=text.decode,
        encode=text.encode,
        fingerprint=fingerprint(*hashed, whole=False),
        origin=origin,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A tokenizer that is read when it is first asked: it must not be there before ranks are forked."""

    file: str

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text."""
        return _loaded(self.file).decode([int(token) for token in tokens], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Text to tokens."""
        return _loaded(self.file).encode(text, add_special_tokens=False).ids


@cache
def _loaded(file: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)


def text_of(tokenizer: str, tokens: np.ndarray, vocab: int, letters: str = "") -> Tokenized:
    """Tokens, and how they are written and read. letters: the vocabulary of `char`."""
    folder = folder_of(tokenizer)
    if folder is not None:
        spoken = _Spoken(str(folder.file))
        return Tokenized(tokens, vocab, spoken.decode, spoken.encode)
    if tokenizer == "byte":
        return Tokenized(tokens, 256, _read_bytes, lambda text: list(text.encode()))
    index = {letter: n for n, letter in enumerate(letters)}
    return Tokenized(tokens, vocab, _joined(letters), lambda text: [index[letter] for letter in text])


def _joined(letters: str) -> Callable[[Sequence[int]], str]:
    return lambda tokens: "".join(letters[int(token)] for token in tokens).replace(NUL, "\n")


def _read_bytes(tokens: Sequence[int]) -> str:
    return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

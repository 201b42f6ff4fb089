"""Text to tokens and back: bytes, or characters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.spec.errors import UsageError

# Between documents. NUL: Python's source may not contain it, and other text hardly ever does.
SEPARATOR = b"\0"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """tokens: [n] uint8, uint16 or uint32; vocab: how many different ones there can be."""

    tokens: np.ndarray
    vocab: int
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]


def as_bytes(documents: Sequence[tuple[str, bytes]]) -> Tokenized:
    """Each byte is a token; the vocabulary is 256, whatever occurs."""
    joined = SEPARATOR.join(body for _, body in documents)

    def decode(tokens: Sequence[int]) -> str:
        return bytes(int(t) for t in tokens).decode("utf-8", errors="replace")

    return Tokenized(np.frombuffer(joined, dtype=np.uint8), 256, decode, lambda text: list(text.encode()))


def as_characters(documents: Sequence[tuple[str, bytes]]) -> Tokenized:
    """Each character of UTF-8 text is a token; the vocabulary is the sorted set of those that occur.

    Raises UsageError D06, with file and offset, where a document is not UTF-8.
    """
    text = SEPARATOR.decode().join(_utf8(name, body) for name, body in documents)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    occurs = np.zeros(0x110000, dtype=bool)
    occurs[codes] = True
    present = np.flatnonzero(occurs)
    number = np.zeros(0x110000, dtype=np.uint8 if len(present) <= 256 else np.uint32)
    number[present] = np.arange(len(present))
    letters = [chr(int(code)) for code in present]
    index = {letter: n for n, letter in enumerate(letters)}

    def encode(text: str) -> list[int]:
        unknown = next((letter for letter in text if letter not in index), None)
        if unknown is not None:
            raise UsageError(
                f"the character {unknown!r} does not occur in the training text",
                code="D06",
                fix='other words, or data.tokenizer = "byte", which knows every text',
            )
        return [index[letter] for letter in text]

    return Tokenized(
        number[codes], len(present), lambda tokens: "".join(letters[int(t)] for t in tokens), encode
    )


def _utf8(name: str, body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"not UTF-8 text: byte 0x{body[error.start]:02x} at offset {error.start:,}",
            code="D06",
            where=name,
            likely="a binary file, or text in another encoding",
            fix='data.tokenizer = "byte", or convert the file to UTF-8',
        ) from error

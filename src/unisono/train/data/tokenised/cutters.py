"""Tokenizers by name, as workers use them: bytes, characters, or a folder with a `tokenizer.json`."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home

# Names that tokenizers give to the end of a text, where no settings say it.
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NUL = "\0"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as tokens. starts, ends: of each token, the character at which it begins and the one behind it; empty if
    nobody asked."""

    tokens: "array[int]"
    starts: Sequence[int] = ()
    ends: Sequence[int] = ()


Encode = Callable[
    [Sequence[str], bool, bool], list[Encoded]
]  # texts, whether to say where tokens begin, add special ones


@dataclass(frozen=True)
class Folder:
    """A tokenizer's folder, or its `tokenizer.json`. Raises UsageError D11 where there is none."""

    path: str
    file: Path = field(init=False)

    def __post_init__(self) -> None:
        place = at_home(self.path)
        file = place / "tokenizer.json" if place.is_dir() else place
        if not file.is_file():
            what = "holds no tokenizer.json" if place.is_dir() else "is neither a folder nor a tokenizer.json"
            raise UsageError(
                f"the tokenizer's place {self.path} {what}",
                code="D11",
                where="data.tokenizer",
                fix="hf:FOLDER as transformers saves it, with tokenizer.json; names are not looked up on the network",
            )
        object.__setattr__(self, "file", file)

    @property
    def folder(self) -> Path:
        """The folder of its settings."""
        return self.file.parent

    @property
    def vocab(self) -> int:
        """The largest number of a token, and one."""
        file = self._read("tokenizer.json")
        listed = file.get("model", {}).get("vocab", {})
        numbers = listed.values() if isinstance(listed, dict) else range(len(listed))
        return 1 + max([*numbers, *(token["id"] for token in file.get("added_tokens", ()))], default=-1)

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides its tokens."""
        digest = blake2b(digest_size=16)
        for name in _FILES:
            path = self.file if name == "tokenizer.json" else self.folder / name
            digest.update(path.read_bytes() if path.is_file() else b"-")
        return digest.hexdigest()

    @property
    def end(self) -> str:
        """The token behind a text. Raises UsageError D11 where nobody says which."""
        said = self._read("tokenizer_config.json").get("eos_token") or self._read(
            "special_tokens_map.json"
        ).get("eos_token")
        if isinstance(said, dict):
            said = said.get("content")
        file = self._read("tokenizer.json")
        known = {token["content"] for token in file.get("added_tokens", ())}
        end = said or next((name for name in _ENDS if name in known), None)
        if end is None:
            raise UsageError(
                "the tokenizer does not say which token ends a text",
                code="D11",
                where=str(self.file),
                fix='data.separator = "TOKEN", one that it has',
            )
        return end

    def templated(self) -> bool:
        """Whether it says how a chat is written."""
        config = self._read("tokenizer_config.json")
        return bool(config.get("chat_template")) or (self.folder / "chat_template.jinja").is_file()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.file if name == "tokenizer.json" else self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {error}", code="D11", where="data.tokenizer") from error


def folder_of(name: str) -> Folder | None:
    """The folder of `hf:PATH`; None for our own tokenizers."""
    return Folder(name.removeprefix("hf:")) if name.startswith("hf:") else None


def width_of(name: str) -> str:
    """The numpy type of a token on disk."""
    folder = folder_of(name)
    if folder is None:
        return {"byte": "u1"}.get(name, "u4")
    return "u2" if folder.vocab <= 1 << 16 else "u4"


def encoder(name: str) -> tuple[Encode, Callable[[str], int]]:
    """(texts → tokens, name of a token → its number). Code points for `char`: they are numbered when all are known."""
    folder = folder_of(name)
    if folder is None:
        return (
            (_bytes, lambda token: ord(token)) if name == "byte" else (_characters, lambda token: ord(token))
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder.file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kind = {"u2": "H", "u4": "I"}[width_of(name)]

    def encode(texts: Sequence[str], starts: bool, special: bool) -> list[Encoded]:
        if not starts:
            return [
                Encoded(array(kind, encoding.ids))
                for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            ]
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [
            Encoded(
                array(kind, encoding.ids),
                [first for first, _ in encoding.offsets],
                [end for _, end in encoding.offsets],
            )
            for encoding in encodings
        ]

    def number(token: str) -> int:
        number_of = tokenizer.token_to_id(token)
        if number_of is None:
            raise UsageError(
                f"the tokenizer has no token {token!r}",
                code="D11",
                where=str(folder.file),
                fix="data.separator: one that it has",
            )
        return number_of

    return encode, number


def _bytes(texts: Sequence[str], starts: bool, special: bool) -> list[Encoded]:
    encoded = [text.encode() for text in texts]
    if not starts:
        return [Encoded(array("B", body)) for body in encoded]
    places = [[i for i, c in enumerate(text) for _ in c.encode()] for text in texts]
    return [Encoded(array("B", body), at, at) for body, at in zip(encoded, places, strict=True)]


def _characters(texts: Sequence[str], starts: bool, special: bool) -> list[Encoded]:
    return [
        Encoded(array("I", text.encode("utf-32-le")), range(len(text)), range(len(text))) for text in texts
    ]

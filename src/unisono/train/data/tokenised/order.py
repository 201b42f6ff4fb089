"""What is to be tokenised, and how: values that cross to worker processes as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN, JSONL, PARQUET, DATASET = "plain", "jsonl", "parquet", "dataset"  # kinds of places


@dataclass(frozen=True, slots=True)
class Fields:
    """Under which keys of a record its parts stand. The first of them that a record has says what it is."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    text: str = "text"


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """How records become tokens.

    kind: of the places. fields: keys of a record. tokenizer: "byte", "char" or "hf:PATH". separator: the token behind
    each document; the tokenizer's own end of text where it is "". answers: whether of a chat only the assistant's words
    are targets that count. skip_bad: go on after a bad record. split: of a data set.
    """

    kind: str
    tokenizer: str
    fields: Fields = field(default_factory=Fields)
    separator: str = ""
    answers: bool = True
    skip_bad: bool = False
    split: str = "train"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "TokenOrder":
        """What `as_json` gave."""
        return cls(**{**values, "fields": Fields(**values["fields"])})


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a place: bytes of a file, row groups of a table, rows of a data set. size: how much work it is."""

    place: str
    start: int
    stop: int
    size: int

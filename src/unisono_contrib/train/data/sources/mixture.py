"""Several sources of text, each with its share of the samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.paths import names_something, parted
from unisono.spec.source import SOURCES, DataSource
from unisono.train.data.words import WordedSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus

_PLUS = " + "
_LONGEST = 16  # pieces of one path


def _is_one(pieces: Sequence[str]) -> bool:
    """Whether what stands between plus signs is one path, all of it."""
    before, text = (_PLUS.join(filter(None, parts)).partition(":")[2] for parts in (pieces[:-1], pieces))
    path, _ = parted(text, ())
    return len(path) > len(before) and names_something(path)


class SourceMixture(WordedSource):
    """Sources with weights: `mixture:0.7*text:books.txt + 0.3*jsonl:chats.jsonl`."""

    name: ClassVar[str] = "mixture"
    main: ClassVar[str] = "parts"
    moves: ClassVar[str] = "a file of one of the sources has changed since"

    parts: str = Field(
        min_length=1, description="WEIGHT*SOURCE + WEIGHT*SOURCE ...; a weight is 1 when absent"
    )

    def weighed(self) -> list[tuple[float, str]]:
        """(weight, source) of each. Raises UsageError C06."""
        weighed = []
        for part in self._parts():
            number, star, source = part.partition("*")
            try:
                weight = float(number) if star else 1.0
            except ValueError:  # a pattern of files
                weight, star = 1.0, ""
            if not 0 < weight < float("inf"):
                what = f"the weight of {source} is {number}"
                raise UsageError(what, code="C06", where="data.source", fix="a number above 0")
            weighed.append((weight, source if star else part))
        return weighed

    def _parts(self) -> list[str]:
        """The text of each: a plus sign between blanks may be part of a path that is there."""
        pieces = [piece for piece in self.parts.split(_PLUS) if piece.strip()]
        parts: list[str] = []
        while pieces:
            ends = range(min(len(pieces), _LONGEST), 1, -1)
            count = next((end for end in ends if _is_one(pieces[:end])), 1)
            part = _PLUS.join(pieces[:count])
            parts.append(part.lstrip() if _is_one(["", part]) else part.strip())
            del pieces[:count]
        return parts

    def _sources(self) -> list[tuple[float, str, DataSource]]:
        return [(weight, text, SOURCES.read(text, "data.source")) for weight, text in self.weighed()]

    def facts(self, tokenizer: str) -> Facts:
        every = [source.facts(tokenizer).vocab for _, _, source in self._sources()]
        return Facts(vocab=next(filter(None, every), None))

    def look(self) -> None:
        for _, _, source in self._sources():
            source.look()

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data.load import mixed

        if data.tokenizer == "char":
            raise UsageError(
                "each source would number its characters by itself",
                code="D11",
                where="data.tokenizer",
                fix='"byte" or "hf:FOLDER", or one text:FOLDER with all files',
            )
        return mixed(self.weighed(), data, model)

"""What all sources of text share: their tokenizer, the files that they mean, and the way from records to a corpus."""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import Facts
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.train.data.tokenised.order import Fields


class WordedSource(DataSource, ABC):
    """Text, of which `data.tokenizer` makes tokens."""

    gives: ClassVar[str] = "tokens"
    worded: ClassVar[bool] = True

    def facts(self, tokenizer: str) -> Facts:
        from unisono.train.data.tokenised.cutters import folder_of

        if tokenizer == "byte":
            return Facts(vocab=256)
        folder = folder_of(tokenizer)
        return Facts(vocab=folder.vocab if folder is not None else None)


class RecordSource(WordedSource, ABC):
    """Records with keys: texts, prompts with completions, or chats."""

    text: str = Field(default="text", min_length=1, description="key of a record's text")
    messages: str = Field(default="messages", min_length=1, description="key of a chat's list of messages")
    prompt: str = Field(default="prompt", min_length=1, description="key of what a completion answers")
    completion: str = Field(default="completion", min_length=1, description="key of a prompt's answer")

    @property
    def fields(self) -> "Fields":
        """The keys."""
        from unisono.train.data.tokenised.order import Fields

        return Fields(self.messages, self.prompt, self.completion, self.text)


def files(path: str, endings: Sequence[str]) -> list[str]:
    """A file, the files of a glob, or those of a folder with one of these endings, in the order of their paths. Raises
    UsageError D02, D04."""
    from unisono.spec.errors import UsageError
    from unisono.train.data import documents

    if several := documents.matched(path):
        return several
    place = documents.existing(path)
    if not place.is_dir():
        documents.look(path)
        return [str(place)]
    paths = sorted(
        str(candidate)
        for candidate in place.rglob("*")
        if candidate.suffix in endings
        and candidate.is_file()
        and not any(part.startswith(".") for part in candidate.relative_to(place).parts)
    )
    if not paths:
        raise UsageError(
            f"the folder holds no file that ends in {' or '.join(endings)}",
            code="D04",
            where=str(place),
            fix=f'data.source with a pattern, such as "{place}/*.txt"',
        )
    return paths

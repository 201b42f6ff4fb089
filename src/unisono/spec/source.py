"""`[data] source` of a recipe: what the declaration of every data source says. No torch."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.spec.errors import UsageError
from unisono.spec.family import Family, Member
from unisono.spec.model import Facts, ModelConfig

if TYPE_CHECKING:
    from unisono.train.data.dataset import Corpus


class DataSource(Member, ABC):
    """Where samples come from.

    gives: what a sample is, as `ModelConfig.reads` says it: "tokens", "pictures", "clicks". worded: it holds text, of
    which `data.tokenizer` makes tokens. moves: why it may be other data at another time, for messages. transforms:
    whether `data.transform` is called for each of its samples.
    """

    gives: ClassVar[str]
    worded: ClassVar[bool] = False
    moves: ClassVar[str] = "the file has changed since"
    transforms: ClassVar[bool] = False

    def facts(self, tokenizer: str) -> Facts:
        """What is known of the data without reading it."""
        return Facts(vocab=256 if self.worded and tokenizer == "byte" else None)

    def look(self) -> None:
        """The simplest mistakes, found at once: nothing there, or nothing in it. Raises UsageError."""
        return None

    def giving(self, wanted: str) -> str:
        """The option that makes its samples what a model reads, as `gives` says it; "" where there is none."""
        return ""

    @abstractmethod
    def load(self, data: Any, model: ModelConfig) -> "Corpus":
        """The samples, split and numbered. data: the recipe's [data] section. Starts no thread, so that a fork may
        follow. Raises UsageError."""


SOURCES: Family[DataSource] = Family(
    "data source", "unisono.train.data.sources", DataSource, "data.source", ("C06", "C06")
)


def counted_in(source: str) -> str:
    """What runs on a source count: "tokens" of text, "samples" of anything else. source: `data.source` of a recipe."""
    name = source.partition(":")[0]
    try:
        is_text = name not in SOURCES.names() or SOURCES.read(source).gives == "tokens"
    except UsageError:  # of another version
        is_text = True
    return "tokens" if is_text else "samples"

"""A user's own text."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class TextFiles(DataSource):
    """A file of text, or all files of a folder that are not hidden."""

    name: ClassVar[str] = "text"
    main: ClassVar[str] = "path"
    gives: ClassVar[str] = "tokens"
    worded: ClassVar[bool] = True

    path: str = Field(min_length=1, description="a text file, or a folder of them")

    def look(self) -> None:
        from unisono.train.data import documents

        documents.look(self.path)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data import documents
        from unisono.train.data.load import text_corpus

        return text_corpus(documents.text(self.path), self.path, data, model)

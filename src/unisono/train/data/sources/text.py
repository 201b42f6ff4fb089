"""A user's own text."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.train.data.words import WordedSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class TextFiles(WordedSource):
    """A file of text, those of a pattern, or all files of a folder that are not hidden."""

    name: ClassVar[str] = "text"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(min_length=1, description="a text file, a pattern, or a folder of them")

    def look(self) -> None:
        from unisono.train.data import documents

        documents.look(self.path)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data import documents
        from unisono.train.data.load import in_memory, text_corpus

        if not in_memory(data):
            from unisono.train.data.texts import token_corpus
            from unisono.train.data.tokenised.order import PLAIN

            return token_corpus(PLAIN, documents.text_files(self.path), self.path, data, model)
        return text_corpus(documents.text(self.path), self.path, data, model)

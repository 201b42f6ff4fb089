"""The running Python's own library: text that every machine has."""

from typing import TYPE_CHECKING, ClassVar

from unisono.spec.model import ModelConfig
from unisono.train.data.words import WordedSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class PythonLibrary(WordedSource):
    """The library source of the running Python, about 11 MB of text."""

    name: ClassVar[str] = "stdlib"
    moves: ClassVar[str] = "Python was updated, and its standard library with it"

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data import documents
        from unisono.train.data.load import in_memory, text_corpus

        if not in_memory(data):
            from unisono.train.data.texts import token_corpus
            from unisono.train.data.tokenised.order import PLAIN

            return token_corpus(PLAIN, documents.stdlib_files(), self.name, data, model)
        return text_corpus(documents.stdlib(), self.name, data, model)

"""The running Python's own library: text that every machine has."""

from typing import TYPE_CHECKING, ClassVar

from unisono.spec.model import ModelConfig
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class PythonLibrary(DataSource):
    """The library source of the running Python, about 11 MB of text."""

    name: ClassVar[str] = "stdlib"
    gives: ClassVar[str] = "tokens"
    worded: ClassVar[bool] = True
    moves: ClassVar[str] = "Python was updated, and its standard library with it"

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data import documents
        from unisono.train.data.load import text_corpus

        return text_corpus(documents.stdlib(), self.name, data, model)

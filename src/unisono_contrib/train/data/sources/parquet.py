"""Tables of records: texts, prompts with completions, or chats."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.train.data.words import RecordSource, files

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus

_ENDINGS = (".parquet",)


class ParquetFiles(RecordSource):
    """Parquet files with a record on each row; needs pyarrow."""

    name: ClassVar[str] = "parquet"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(min_length=1, description="a file, a pattern, or a folder of .parquet files")

    def look(self) -> None:
        files(self.path, _ENDINGS)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data.texts import token_corpus
        from unisono.train.data.tokenised.order import PARQUET

        return token_corpus(PARQUET, files(self.path, _ENDINGS), self.path, data, model, self.fields)

"""Tables of records: texts, prompts with completions, or chats; streamed, also pictures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.train.data.words import files
from unisono_contrib.train.data.stream.source import ShardSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus
    from unisono_contrib.train.data.stream.formats import ShardFile
    from unisono_contrib.train.data.stream.store import ShardStore

_ENDINGS = (".parquet",)


class ParquetFiles(ShardSource):
    """Parquet files with a record on each row; needs pyarrow."""

    name: ClassVar[str] = "parquet"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True
    moves: ClassVar[str] = "the file has changed since"

    path: str = Field(
        min_length=1, description="a file, a pattern, a folder of .parquet files, or URLs with {000..049}"
    )
    kind: Literal["pictures", "text"] = Field(
        default="text", description="what a row is; pictures are streamed"
    )
    stream: bool = Field(default=False, description="read shards while the run trains, as those of URLs are")

    @property
    def _streams(self) -> bool:
        return self.stream or self.kind == "pictures" or "://" in self.path

    def _shards(self, store: "ShardStore") -> "Sequence[ShardFile]":
        from unisono_contrib.train.data.stream.formats import shards_of

        return shards_of(store, self.path, "parquet", _ENDINGS)

    def look(self) -> None:
        if not self._streams:
            files(self.path, _ENDINGS)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        if self._streams:
            return super().load(data, model)
        from unisono.train.data.texts import token_corpus
        from unisono.train.data.tokenised.order import PARQUET

        return token_corpus(PARQUET, files(self.path, _ENDINGS), self.path, data, model, self.fields)

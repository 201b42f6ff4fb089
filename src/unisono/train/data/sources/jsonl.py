"""A line of JSON a record: texts, prompts with completions, or chats."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.finder import contributed
from unisono.spec.model import ModelConfig
from unisono.train.data.words import RecordSource, files

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus

_ENDINGS = (".jsonl", ".ndjson")  # of a stream, also with .gz or .zst behind


class JsonlFiles(RecordSource):
    """Files with a record of JSON on each line: a text, a prompt and its completion, or a chat."""

    name: ClassVar[str] = "jsonl"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True

    path: str = Field(
        min_length=1, description="a file, a pattern, a folder of .jsonl files, or URLs with {000..049}"
    )
    stream: bool = Field(default=False, description="read shards while the run trains, as those of URLs are")
    cache_gb: float = Field(
        default=16.0, gt=0, description="of a stream: GiB of it on this disk, under data.cache"
    )
    patience: float = Field(
        default=60.0, ge=0, description="of a stream: seconds until a failing request is given up"
    )

    @property
    def _streams(self) -> bool:
        return self.stream or "://" in self.path

    def look(self) -> None:
        if not self._streams:
            files(self.path, _ENDINGS)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        if self._streams:
            corpus = contributed("unisono.train.data.stream.corpus")
            how = corpus.Streaming(self.patience, self.cache_gb)
            return corpus.lines_stream(self.path, _ENDINGS, self.fields, data, model, how)
        from unisono.train.data.texts import token_corpus
        from unisono.train.data.tokenised.order import JSONL

        return token_corpus(JSONL, files(self.path, _ENDINGS), self.path, data, model, self.fields)

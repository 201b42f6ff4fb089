"""What sources of shards share: their options, and the way to a corpus. No torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.spec.model import Facts, ModelConfig
from unisono.spec.training import Count
from unisono.train.data.words import RecordSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus
    from unisono_contrib.train.data.stream.formats import ShardFile
    from unisono_contrib.train.data.stream.store import ShardStore


class ShardSource(RecordSource, ABC):
    """Shards in folders or object stores."""

    moves: ClassVar[str] = "a shard was written anew"

    kind: Literal["pictures", "text"] = Field(default="pictures", description="what a sample is")
    image: str = Field(default="", description="field of a picture; the usual endings when absent")
    label: str = Field(default="", description="field of a picture's class; cls or label when absent")
    size: Count = Field(default=64, description="height and width where model.image does not say")
    classes: Count | None = Field(
        default=None, description="number of classes; the highest and one when absent"
    )
    cache_gb: float = Field(default=16.0, gt=0, description="GiB of shards on this disk, under data.cache")
    patience: float = Field(default=60.0, ge=0, description="seconds until a request that fails is given up")

    @property
    def gives(self) -> str:  # type: ignore[override]
        return "tokens" if self.kind == "text" else "pictures"

    @property
    def worded(self) -> bool:  # type: ignore[override]
        return self.gives == "tokens"

    @property
    def transforms(self) -> bool:  # type: ignore[override]
        return self.gives == "pictures"

    def giving(self, wanted: str) -> str:
        return {"tokens": "kind=text", "pictures": "kind=pictures"}.get(wanted, "")

    @abstractmethod
    def _shards(self, store: "ShardStore") -> "Sequence[ShardFile]":
        """The shards, in order. Raises UsageError."""

    def facts(self, tokenizer: str) -> Facts:
        return super().facts(tokenizer) if self.worded else Facts(classes=self.classes)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono_contrib.train.data.stream.corpus import (
            Streaming,
            picture_shape,
            picture_stream,
            text_stream,
        )

        how, origin = Streaming(self.patience, self.cache_gb), f"{self.name}:{getattr(self, self.main)}"
        shards = self._shards(how.places(data).store)
        if self.worded:
            return text_stream(shards, origin, self.fields, data, model, how)
        shape = picture_shape(model, self.size)
        return picture_stream(shards, origin, (self.image, self.label), shape, self.classes, data, how)

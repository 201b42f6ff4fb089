"""Data sets of the library `datasets` that are on this machine."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig
from unisono.train.data.words import RecordSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class HubDataset(RecordSource):
    """A data set that `datasets` has saved to a folder, or keeps in its cache; nothing is downloaded."""

    name: ClassVar[str] = "hf"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True
    moves: ClassVar[str] = "the data set was made anew, or loaded in another version"

    path: str = Field(min_length=1, description="a folder that save_to_disk made, or a name in the cache")
    split: str = Field(default="train", min_length=1, description="which part of it")

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data.texts import token_corpus
        from unisono.train.data.tokenised.order import DATASET

        return token_corpus(DATASET, [self.path], self.path, data, model, self.fields, self.split)

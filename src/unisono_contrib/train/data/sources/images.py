"""A user's own pictures."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import Facts, ModelConfig
from unisono.spec.paths import at_home
from unisono.spec.source import DataSource
from unisono.spec.training import Count

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class ImageFolder(DataSource):
    """Pictures in folders of classes, decoded once, in the size that the model has."""

    name: ClassVar[str] = "images"
    main: ClassVar[str] = "path"
    takes_path: ClassVar[bool] = True
    gives: ClassVar[str] = "pictures"

    path: str = Field(min_length=1, description="a folder that holds a folder for each class")
    size: Count = Field(default=64, description="height and width where model.image does not say")

    def facts(self, tokenizer: str) -> Facts:
        place = at_home(self.path)
        if not place.is_dir():
            return Facts()
        folders = sum(1 for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
        return Facts(classes=folders or None)

    def look(self) -> None:
        from unisono_contrib.train.data.folders import classes_of

        classes_of(self.path)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono_contrib.train.data.pictures import picture_corpus

        shape = model.sized(Facts()).sample_shape
        if shape is None or len(shape) != 3:
            shape = (3, self.size, self.size)
        return picture_corpus(self.path, shape, data)

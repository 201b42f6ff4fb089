"""Handwritten digits: pictures small enough for any test."""

from typing import TYPE_CHECKING, ClassVar

from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import DataSource

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus


class Handwriting(DataSource):
    """The 1797 digits of 8 x 8 pixels that scikit-learn carries (Alpaydin, Kaynak, 1998)."""

    name: ClassVar[str] = "digits"
    gives: ClassVar[str] = "pictures"
    moves: ClassVar[str] = "scikit-learn was updated"

    def facts(self, tokenizer: str) -> Facts:
        return Facts(classes=10, sample_shape=(1, 8, 8))

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        from unisono.train.data.dataset import Corpus
        from unisono.train.data.load import fingerprint
        from unisono_contrib.train.data.digits import digits

        train, val = digits(data.val_fraction)
        known = self.facts(data.tokenizer)
        return Corpus(
            train=train,
            val=val,
            vocab=None,
            classes=known.classes or 0,
            sample_shape=known.sample_shape or (),
            decode=None,
            encode=None,
            fingerprint=fingerprint(train.inputs.numpy(), train.targets.numpy()),
            origin=self.name,
        )

"""A made-up log of clicks, for recommenders."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import DataSource
from unisono.spec.training import Count, Natural

if TYPE_CHECKING:
    from unisono.config import DataConfig
    from unisono.train.data.dataset import Corpus

_DENSE, _ROWS, _LOOKUPS = 13, (1000, 200, 50, 10), 1  # where the model leaves them open


class ClickLog(DataSource):
    """Samples that a seed makes: numbers, indices by a power law, and whether a hidden model says click."""

    name: ClassVar[str] = "clicks"
    gives: ClassVar[str] = "clicks"
    moves: ClassVar[str] = "this version makes other samples"

    samples: Count = Field(default=100_000, description="samples of the log")
    seed: Natural = Field(default=0, le=2**32, description="which log")

    def facts(self, tokenizer: str) -> Facts:
        return Facts(classes=2, rows=_ROWS)

    def load(self, data: "DataConfig", model: ModelConfig) -> "Corpus":
        import numpy as np

        from unisono.train.data.dataset import Corpus, require_samples
        from unisono.train.data.load import fingerprint
        from unisono_contrib.train.data.clicks import Clicks

        rows = getattr(model, "tables", ()) or _ROWS
        dense, lookups = getattr(model, "n_dense", _DENSE), getattr(model, "lookups", _LOOKUPS)
        held = int(self.samples * data.val_fraction)
        train, val = (
            Clicks(self.seed, first, count, dense, rows, lookups)
            for first, count in ((0, self.samples - held), (self.samples - held, held))
        )
        require_samples(len(train), 1, self.name, f"{self.name}:samples=100000")
        parts = [part.numpy() for part in train.fetch(np.arange(min(64, len(train))))]
        size = np.array([self.samples, *rows])
        return Corpus(
            train=train,
            val=val,
            vocab=None,
            classes=2,
            sample_shape=(dense + lookups * len(rows),),
            decode=None,
            encode=None,
            fingerprint=fingerprint(size, *parts),
            origin=self.name,
            rows=rows,
        )

"""Clients in processes of their own, each with all the data that its recipe names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from unisono_contrib.spec.federated import SampleSplit

if TYPE_CHECKING:
    import numpy as np


class OwnSplit(SampleSplit):
    """Each client has all the training data of its process: for --serve and --join, where recipes differ in [data]."""

    name: ClassVar[str] = "own"
    apart: ClassVar[bool] = True

    def assign(
        self, samples: int, classes: "np.ndarray | None", clients: int, seed: int
    ) -> "Sequence[np.ndarray]":
        import numpy as np

        return [np.arange(samples, dtype=np.int64)] * clients

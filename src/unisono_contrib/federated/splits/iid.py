"""Every client has samples like any other's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from unisono_contrib.spec.federated import SampleSplit

if TYPE_CHECKING:
    import numpy as np


class EvenSplit(SampleSplit):
    """All samples in a drawn order, cut into parts of equal size."""

    name: ClassVar[str] = "iid"

    def assign(
        self, samples: int, classes: "np.ndarray | None", clients: int, seed: int
    ) -> "Sequence[np.ndarray]":
        import numpy as np

        from unisono_contrib.federated.draws import chosen

        order = np.array(chosen(seed, "split", samples, samples), dtype=np.int64)
        return [np.sort(part) for part in np.array_split(order, clients)]

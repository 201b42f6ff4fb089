"""The pathological split of FedAvg (McMahan et al., "Communication-efficient learning", 2017, section 3)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Count
from unisono_contrib.spec.federated import SampleSplit

if TYPE_CHECKING:
    import numpy as np


class ShardsSplit(SampleSplit):
    """Samples sorted by class and cut into shards, of which each client has a few: it sees few classes."""

    name: ClassVar[str] = "shards"
    main: ClassVar[str] = "each"
    by_class: ClassVar[bool] = True

    each: Count = Field(default=2, description="shards of a client")

    def assign(
        self, samples: int, classes: "np.ndarray | None", clients: int, seed: int
    ) -> "Sequence[np.ndarray]":
        import numpy as np

        from unisono_contrib.federated.draws import chosen

        if classes is None:
            raise ValueError("a split by class needs classes")
        drawn = np.array(chosen(seed, "split", samples, samples), dtype=np.int64)
        sorted_by_class = drawn[np.argsort(classes[drawn], kind="stable")]
        count = clients * self.each
        shards = np.array_split(sorted_by_class, count)
        turn = chosen(seed, "shards", count, count)
        taken = (turn[client * self.each : (client + 1) * self.each] for client in range(clients))
        return [np.sort(np.concatenate([shards[i] for i in numbers])) for numbers in taken]

"""What is no transformer, in numbers: a workload of parts, and what prices ask of it."""

from dataclasses import dataclass

from unisono.planner.work.sample import UNSAID, Sample
from unisono.spec.workload import Workload


@dataclass(frozen=True, slots=True)
class Network:
    """A workload that is dealt by dp, shard and pp alone. tokens: what one sample counts for. states: numbers that the
    optimiser keeps of each parameter, 2 of Adam, 1 of a velocity. by_weights: pp deals equal weights to its rows, as
    `train` does, rather than equal arithmetic. sample: its bytes, 0 where nobody has said."""

    workload: Workload
    tokens: int = 1
    states: int = 2
    by_weights: bool = False
    sample: Sample = UNSAID

    @property
    def n_layer(self) -> int:
        """Parts that pp deals out."""
        return len(self.workload.blocks)

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.tokens

    @property
    def tied_elements(self) -> int:
        """Of a weight that both ends have."""
        return self.workload.tied

    def matrices(self, tp: int) -> tuple[list[tuple[float, float]], float]:
        """(rows and columns of the weights, elements of all weights but tables)."""
        parts = self.workload.parts
        shapes = [
            (float(product.inner), float(product.columns))
            for part in parts
            for product in part.products
            if not product.batched
        ]
        return shapes, float(sum(p.parameters - (p.tables.elements if p.tables else 0) for p in parts))

    @property
    def n_head(self) -> int:
        """Nothing that tp could deal out."""
        return 1

    @property
    def kv_heads(self) -> int:
        return 1

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples."""
        return float(batch) * self.workload.step_flops

"""The live optimiser of `kfac`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unisono_contrib.train.optim._curved_steps import FirstState, ShampooSteps
from unisono_contrib.train.step.layer_products import Edges, LayerProducts


class KfacSteps(ShampooSteps):
    """Momentum between the inverses of two means, which the run observes. products: what observes it. edges, every: see
    `layer_products.listen`."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, first: FirstState, interval: int,
        keep: tuple[float, float], damping: float, rms: bool, edges: Edges, every: int,
    ) -> None:  # fmt: skip
        super().__init__(groups, lr, first, interval, keep, 1.0, damping, rms)
        self.edges, self.every = edges, every
        self.products: LayerProducts | None = None
        self._means: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient, by what has passed its layer."""
        if self.products is None:
            raise RuntimeError("nobody observes the layers whose weights are stepped")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._means = self.products.gather(params, self.owners)
        super().step(closure)
        self._means = {}

    def direction(self, p: nn.Parameter, whole: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not self.state[p]:
            self.state[p].update(self.first(whole))
        if means := self._means.get(p):
            take_in(self.state[p], means, self.keep[1])
        return super().direction(p, whole, group)

    def learn(self, state: dict[str, Tensor], grad: Tensor) -> None:
        """Both means are observed: a gradient adds nothing to them."""


def take_in(state: dict[str, Tensor], means: Mapping[str, Tensor], keep: float) -> None:
    """Let running means take in those of a step: the first one is kept as it is, and the k-th for at least a k-th
    (Martens & Grosse, 2015, section 5)."""
    state["taken"] += 1
    for side, mean in means.items():
        state[side].lerp_(mean, 1 - min(keep, 1 - 1 / int(state["taken"])))

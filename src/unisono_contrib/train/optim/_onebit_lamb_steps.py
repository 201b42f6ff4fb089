"""The live optimiser of `onebit_lamb`.

While the second moment learns, a mean of trust ratios is kept. After that a ratio is the frozen mean times a factor.
The factor follows a second moment that goes on learning, from gradients that were rebuilt of coded moments: it is the
largest quotient of an element's frozen root and the one of now.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono_contrib.train.optim._normed_steps import grads_of
from unisono_contrib.train.optim._trust_laws import Clip, trust_ratio
from unisono_contrib.train.optim._trust_steps import MomentSteps, decayed_

FRESH, MEAN, FACTOR = "exp_avg_sq_fresh", "trust_mean", "trust_last_factor"


def first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Before the first step; numbers of no dims lie on the host. The mean ratio begins at zero, and is divided by what
    it has seen of its mean, as moments are. A factor of zero is that of no step yet."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        FRESH: torch.zeros_like(parameter),
        MEAN: torch.zeros((), dtype=torch.float64),
        FACTOR: torch.zeros((), dtype=torch.float64),
    }


class OneBitLambSteps(MomentSteps):
    """Columns of norms: weights, steps; of the largest elements: frozen roots over those of now."""

    largest: ClassVar[tuple[int, ...]] = (2,)

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        clip: Clip,
        reach: float,
        learnt: Callable[[int], int],
        decay: float,
        factor_bounds: Callable[[float], tuple[float, float]],
    ) -> None:
        """reach, learnt: as of `FrozenAdam`. decay: of the mean ratio. factor_bounds: as of `OneBitLamb`."""
        super().__init__(groups, lr, betas, eps, clip)
        self.reach, self.learnt, self.decay, self.factor_bounds = reach, learnt, decay, factor_bounds

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return first_state(parameter)

    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        learnt = self.learnt(count + 1)
        learns = learnt > self.learnt(count)
        if number == 0:
            self._learn(params, learns)
        moves, most = self.means(params, count + 1), self.reach
        below = self.roots(params, learnt)
        torch._foreach_div_(moves, below)
        torch._foreach_clamp_max_(moves, most)
        torch._foreach_clamp_min_(moves, -most)
        decayed_(moves, params, group["weight_decay"])
        if number == 0:
            self.norms.measure(0, params, params)
            self.norms.measure(1, params, moves)
            torch._foreach_div_(below, self.roots(params, count + 1, FRESH))
            self.norms.measure_largest(2, params, below)
            return
        rates = [
            group["lr"] * self._ratio(p, norms, learns, learnt)
            for p, norms in zip(params, self.norms.of(params), strict=True)
        ]
        torch._foreach_mul_(moves, rates)
        torch._foreach_sub_(params, moves)
        self.count_step(params)

    def _learn(self, params: list[Tensor], learns: bool) -> None:
        grads = grads_of(params)
        self.learn("exp_avg", params, self.betas[0], grads)
        squares = list(torch._foreach_mul(grads, grads))
        for key in ("exp_avg_sq", FRESH) if learns else (FRESH,):
            self.learn(key, params, self.betas[1], squares)

    def _ratio(self, p: Tensor, norms: Sequence[float], learns: bool, learnt: int) -> float:
        """The trust ratio of a parameter's step, which changes what is kept of ratios. norms: its columns."""
        weight, move, quotient = norms
        state, decay = self.state[p], self.decay
        if learns:
            ratio = trust_ratio(weight, move, self.clip)
            state[MEAN].mul_(decay).add_((1 - decay) * ratio)
            return ratio
        low, high = self.factor_bounds(float(state[FACTOR]) or 1.0)
        state[FACTOR].fill_(min(max(quotient, low), high))
        return float(state[MEAN]) / (1 - decay**learnt) * float(state[FACTOR])

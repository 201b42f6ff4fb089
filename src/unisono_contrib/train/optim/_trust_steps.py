"""The live optimisers of `lars`, `lamb` and `lans`."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono_contrib.train.optim._normed_steps import NormedSteps, grads_of
from unisono_contrib.train.optim._trust_laws import Clip, trust_ratio


class LarsSteps(NormedSteps):
    """Columns of norms: weights, gradients."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, momentum: float, coefficient: float, clip: Clip
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self.momentum, self.coefficient, self.clip = momentum, coefficient, clip

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if self.momentum else {}

    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        grads, decay = grads_of(params), group["weight_decay"]
        if number == 0:
            self.norms.measure(0, params, params)
            self.norms.measure(1, params, grads)
            return
        rates = [
            trust_ratio(self.coefficient * weight, grad + decay * weight, self.clip)
            for weight, grad in self.norms.of(params)
        ]
        moves = torch._foreach_mul(params, decay)
        torch._foreach_add_(moves, grads)
        torch._foreach_mul_(moves, rates)
        if self.momentum:
            velocities = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, moves)
            moves = velocities
        torch._foreach_sub_(params, torch._foreach_mul(moves, group["lr"]))


class MomentSteps(NormedSteps):
    """Steps with Adam's two moments, each divided by what it has seen of its mean so far."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        clip: Clip,
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self.betas, self.eps, self.clip = betas, eps, clip

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The counter lies on the host, which groups parameters by it."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def kept(self, params: list[Tensor], key: str) -> list[Tensor]:
        """One tensor of the state of each parameter."""
        return [self.state[p][key] for p in params]

    def learn(self, key: str, params: list[Tensor], beta: float, new: list[Tensor]) -> None:
        """A moment of each parameter becomes `beta` of itself and `1 - beta` of what is new."""
        moments = self.kept(params, key)
        torch._foreach_mul_(moments, beta)
        torch._foreach_add_(moments, torch._foreach_mul(new, 1 - beta))

    def roots(self, params: list[Tensor], seen: int, key: str = "exp_avg_sq") -> list[Tensor]:
        """The root of the second moment, of which `seen` steps are part, and eps."""
        below = list(torch._foreach_sqrt(self.kept(params, key)))
        torch._foreach_div_(below, math.sqrt(1 - self.betas[1] ** seen))
        torch._foreach_add_(below, self.eps)
        return below

    def means(self, params: list[Tensor], seen: int) -> list[Tensor]:
        """The first moment, of which `seen` steps are part."""
        return list(torch._foreach_div(self.kept(params, "exp_avg"), 1 - self.betas[0] ** seen))

    def count_step(self, params: list[Tensor]) -> None:
        """One more update of each parameter."""
        for p in params:
            self.state[p]["step"] += 1


def decayed_(moves: list[Tensor], params: list[Tensor], decay: float) -> list[Tensor]:
    """Add weight decay to steps, in place: inside of what the trust ratio scales."""
    if decay:
        torch._foreach_add_(moves, torch._foreach_mul(params, decay))
    return moves


class LambSteps(MomentSteps):
    """Columns of norms: weights, steps. A step is computed again when its norm is known, since keeping the steps of
    all parameters until then takes the memory of one more state."""

    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        if number == 0:
            grads = grads_of(params)
            self.learn("exp_avg", params, self.betas[0], grads)
            self.learn("exp_avg_sq", params, self.betas[1], list(torch._foreach_mul(grads, grads)))
            self.norms.measure(0, params, params)
        moves = self.means(params, count + 1)
        torch._foreach_div_(moves, self.roots(params, count + 1))
        decayed_(moves, params, group["weight_decay"])
        if number == 0:
            self.norms.measure(1, params, moves)
            return
        rates = [group["lr"] * trust_ratio(w, m, self.clip) for w, m in self.norms.of(params)]
        torch._foreach_mul_(moves, rates)
        torch._foreach_sub_(params, moves)
        self.count_step(params)


class LansSteps(MomentSteps):
    """Columns of norms: gradients, weights, steps along the moment, steps along the gradient."""

    meets: ClassVar[tuple[tuple[int, ...], ...]] = ((0,), (1, 2, 3))

    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        if number == 0:
            self.norms.measure(0, params, grads_of(params))
            return
        units = [trust_ratio(1.0, norms[0], None) for norms in self.norms.of(params)]
        grads = list(torch._foreach_mul(grads_of(params), units))
        if number == 1:
            self.learn("exp_avg", params, self.betas[0], grads)
            self.learn("exp_avg_sq", params, self.betas[1], list(torch._foreach_mul(grads, grads)))
        below = self.roots(params, count + 1)
        moves = self.means(params, count + 1)
        for steps in (moves, grads):
            torch._foreach_div_(steps, below)
            decayed_(steps, params, group["weight_decay"])
        if number == 1:
            for column, tensors in ((1, params), (2, moves), (3, grads)):
                self.norms.measure(column, params, tensors)
            return
        lr, share = group["lr"], self.betas[0]
        norms = self.norms.of(params)
        torch._foreach_mul_(moves, [lr * share * trust_ratio(w, m, self.clip) for _, w, m, _ in norms])
        torch._foreach_mul_(grads, [lr * (1 - share) * trust_ratio(w, g, self.clip) for _, w, _, g in norms])
        torch._foreach_add_(moves, grads)
        torch._foreach_sub_(params, moves)
        self.count_step(params)

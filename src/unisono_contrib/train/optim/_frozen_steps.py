"""The live optimiser of `_frozen`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Before the first step. The counter lies on the host, which asks it before each bucket leaves."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


class FrozenSteps(Optimizer):
    """One kernel for all tensors in each operation, since there are many small ones."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        reach: float,
        whole_steps: Callable[[int], int],
    ) -> None:
        """reach, whole_steps: as of `FrozenAdam`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.reach, self.whole_steps = reach, whole_steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_count: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.update({} if state else first_state(p))
                    by_count.setdefault(int(state["step"]), []).append(p)
            for count, params in by_count.items():
                self._update(group, params, count)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], count: int) -> None:
        """Update parameters that were updated `count` times before."""
        (b1, b2), lr = group["betas"], group["lr"]
        states, grads = [self.state[p] for p in params], [g for p in params if (g := p.grad) is not None]
        moments, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(moments, b1)
        torch._foreach_add_(moments, grads, alpha=1 - b1)
        learnt = self.whole_steps(count + 1)
        if learnt > self.whole_steps(count):
            torch._foreach_mul_(squares, b2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, math.sqrt(1 - b2**learnt))
        torch._foreach_add_(below, group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        moves, most = torch._foreach_div(moments, below), self.reach * (1 - b1 ** (count + 1))
        torch._foreach_clamp_max_(moves, most)
        torch._foreach_clamp_min_(moves, -most)
        torch._foreach_add_(params, moves, alpha=-lr / (1 - b1 ** (count + 1)))
        for state in states:
            state["step"] += 1

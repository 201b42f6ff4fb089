"""What a rank's optimiser is given, and what it makes of the weights, whoever calls it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unisono.library.proof_rank import whole


@dataclass(slots=True)
class SeenStep:
    """One step as a rank has it. gradients: those that the optimiser was given, {} where the stack does not show them.
    weights: after the step. calls: how often each optimiser was called, by its id."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)


class StackWatch:
    """Sees steps of optimisers. named(): the trained parameters of now, by the names of one device. by_call: whether
    each call of an optimiser is a step of its own, since the stack owns the loop; else `step` says what a step is."""

    def __init__(self, named: Callable[[], Mapping[str, Tensor]], by_call: bool) -> None:
        self._named, self._by_call = named, by_call
        self.steps: list[SeenStep] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at all optimisers of this process."""
        hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def step(self) -> Iterator[SeenStep]:
        """Take all that happens inside for one step."""
        self.steps.append(SeenStep())
        yield self.steps[-1]

    def take(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep gradients of the step under way; those that it was given first stay."""
        if self.steps:
            for name, grad in gradients.items():
                self.steps[-1].gradients.setdefault(name, copied(grad))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._by_call and (not self.steps or id(optimizer) in self.steps[-1].calls):
            self.steps.append(SeenStep())
        if not self.steps:
            return None
        calls = self.steps[-1].calls
        calls[id(optimizer)] = calls.get(id(optimizer), 0) + 1
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._look(optimizer)
            return None

        def seen() -> Any:
            result = closure()
            self._look(optimizer)
            return result

        return args[:1], kwargs | {"closure": seen}

    def _look(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = {name: p for name, p in self._named().items() if id(p) in held}
        if any(p.grad is not None for p in params.values()):
            self.take({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()})

    def _after(self, *_: Any) -> None:
        if self._by_call:
            self.steps[-1].weights = {name: copied(p) for name, p in self._named().items()}


def copied(x: Tensor) -> Tensor:
    """A tensor with all its shards, as it is now."""
    return whole(x.detach()).contiguous().clone().cpu()

"""Live optimisers whose step needs norms of whole parameters, and these norms where each parameter is whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class Norms:
    """2-norms of parameters and of tensors like them, in one step. Here each tensor is whole on its rank; see
    `train.step.whole_norms` for parts of one.

    columns: numbers of each parameter, kept until they are measured again in the next step.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.known: dict[Tensor, list[float]] = {}

    def measure(self, column: int, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """The 2-norm of one tensor for each parameter becomes its number in `column`."""
        self._put(column, params, torch.stack(torch._foreach_norm(list(tensors))).tolist())

    def measure_largest(self, column: int, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """The largest element, not negative, of one tensor for each parameter becomes its number in `column`."""
        self._put(column, params, [float(x.max()) if x.numel() else 0.0 for x in tensors])

    def meet(self, sums: Sequence[int], largest: Sequence[int] = ()) -> None:
        """Bring the parts of ranks together, of the columns that were measured so. Every rank of a replica calls it, or
        it hangs."""

    def of(self, params: Sequence[Tensor]) -> list[list[float]]:
        """The numbers of each parameter, by column."""
        return [self.known[p] for p in params]

    def _put(self, column: int, params: Sequence[Tensor], numbers: Sequence[float]) -> None:
        for p, number in zip(params, numbers, strict=True):
            self.known.setdefault(p, [0.0] * self.columns)[column] = number


class NormedSteps(Optimizer, ABC):
    """A step in several passes over all parameters. Between two passes ranks meet once, whatever the number of
    parameters, and each knows the norms that the pass before has measured.

    number: see `parallel.offload.streaming.passes_of`. meets: for each pass but the last, the columns of `norms` that
    it measures as norms. largest: columns that the pass before the last measures as largest elements.

    Subclasses use sums, products, quotients and roots, each as a kernel of its own. Every one of these is rounded by
    IEEE 754, while a fused multiply-add is used in full vector registers alone; so an element has the same bits
    wherever its tensor is cut.
    """

    meets: ClassVar[tuple[tuple[int, ...], ...]] = ((0, 1),)
    largest: ClassVar[tuple[int, ...]] = ()
    number: int | None = None

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {**defaults, "weight_decay": 0.0})
        self.passes = len(self.meets) + 1
        self.norms = Norms(self.columns())
        self._passed = 0

    @classmethod
    def columns(cls) -> int:
        """How many numbers of each parameter `norms` knows."""
        return 1 + max(*(column for meet in cls.meets for column in meet), *cls.largest)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for number in range(self.passes) if self.number is None else (self.number,):
            if number and number != self._passed:
                self.norms.meet(self.meets[number - 1], self.largest if number == self.passes - 1 else ())
            self._passed = number
            for group in self.param_groups:
                by_count: dict[int, list[Tensor]] = {}
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state.update({} if state else self.first_state(p))
                        by_count.setdefault(int(state.get("step", 0)), []).append(p)
                for count, params in by_count.items():
                    self.make_pass(number, group, params, count)

    @abstractmethod
    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What it keeps of a parameter before the first step."""

    @abstractmethod
    def make_pass(self, number: int, group: dict[str, Any], params: list[Tensor], count: int) -> None:
        """Pass `number` of a step over parameters with gradients that were updated `count` times before."""


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients."""
    return [g for p in params if (g := p.grad) is not None]

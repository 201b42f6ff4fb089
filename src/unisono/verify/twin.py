"""How far rounding may take one run from another, where no formula says it: measured by a twin.

A plan that promises EXACT has the bits of one device. Elsewhere sums are taken in another order, and differences pass
from step to step through the weights. How far is measured, not guessed. A *twin* makes the same steps from the same
state, and in each of them all its gradients are pushed, element by element and by a random sign, as far as rounding may
push them (`bounds.bounds_of`). A number may differ by the bound of its own step, plus lambda times as much as the
twin's differs: the twin is one draw of a random deviation, lambda the number of standard deviations that all bounds
allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.parallel.params import Slot, values_of
from unisono.spec.finder import contributed
from unisono.train.step.run import Run
from unisono.verify.bounds import Bounds


@dataclass(frozen=True, slots=True)
class RunTolerance:
    """What may differ, relative to what it should be: nothing if `exact`. leaves: of a global batch. paced: whether the
    learning rate follows the noise of gradients."""

    bounds: Bounds
    exact: bool
    leaves: int
    paced: bool = False

    def number(self, kind: str, drift: float) -> float:
        """Return it for a loss, a gradient's norm or a learning rate. drift: how much the twin's differs."""
        if self.exact:
            return 0.0
        if kind == "lr":
            return self.bounds.rate(self.bounds.most) + self.bounds.spread * drift if self.paced else 0.0
        loss = self.bounds.loss + self.bounds.total(self.leaves)
        return (
            loss if kind == "loss" else self.bounds.most * self.bounds.spread
        ) + self.bounds.spread * drift

    def tensor(self, name: str, drift: float, updates: int = 1) -> float:
        """Return it for a tensor of a checkpoint, relative to its largest entry. updates: since both were equal."""
        if self.exact:
            return 0.0
        kept = updates * self.bounds.kept * name.startswith("model/")
        return self.bounds.spread * (drift + self.bounds.unit + kept)


def make_twin(run: Run, bounds: Bounds) -> None:
    """Have a run push all its gradients, from now on, as far as rounding may push them; what its optimiser observes of
    layers too."""
    measure, noise = run.measure, torch.Generator().manual_seed(0)
    for part in getattr(run.update.optimizer, "parts", (run.update.optimizer,)):
        if (products := getattr(part, "products", None)) is not None:
            contributed("unisono.verify.layer_products").push_means(products, bounds.observed, noise)

    def pushing(slots: Sequence[Slot], extra: Tensor) -> list[float]:
        numbers = measure(slots, extra)
        grads = {slot.name: slot.master.grad for slot in run.local.slots if not slot.alias}
        push({name: values_of(grad) for name, grad in grads.items() if grad is not None}, bounds, noise)
        return numbers

    run.measure = pushing


@torch.no_grad()
def push(grads: Mapping[str, Tensor], bounds: Bounds, noise: torch.Generator) -> None:
    """Move each gradient, element by element, by its bound times its tensor's largest entry; a tensor of mere rounding
    by its bound times the model's largest. Zeros, such as those of half of an adapter in its first step, stay zeros, as
    they do under any order of summation and any codec."""
    tops = {name: grad.abs().max().item() if grad.numel() else 0.0 for name, grad in grads.items()}
    most = max(tops.values(), default=0.0)
    for name, grad in grads.items():
        signs, bound = torch.randint(0, 2, grad.shape, generator=noise).to(grad) * 2 - 1, bounds.of(name)
        grad.add_(signs, alpha=bound * max(tops[name], bound * most) if tops[name] else 0.0)


def apart(value: float, right: float, size: float = 0.0) -> float:
    """Return the relative error of a number. size: how large what it is a sum of is, if that is larger."""
    return abs(value - right) / (max(abs(right), size) or 1.0)


def size_of_step(sizes: Mapping[int, float] | None) -> float:
    """Return the size of a step's loss, from `Player.watch_sizes`; 0 where it is that of the loss itself."""
    return math.fsum((sizes or {}).values())


def gap(x: Tensor, right: Tensor) -> float:
    """Return the largest error of an entry."""
    return (x.double() - right.double()).abs().max().item()


def largest(x: Tensor) -> float:
    """Return the largest magnitude of an entry, 1 where there is none but zeros."""
    return x.double().abs().max().item() or 1.0

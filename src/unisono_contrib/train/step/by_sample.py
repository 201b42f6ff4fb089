"""Gradients of single samples: all of a few samples at once by `torch.func`, or one after the other by autograd."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unisono.comm.device import is_apart
from unisono.parallel.cut import Carry, tensors_of
from unisono.spec.errors import UsageError

Grads = dict[str, Tensor]  # by the parameter's name, [n, ...] each


class Samples(NamedTuple):
    """n samples as a stage sees them, [n, ...] each. inputs: of the model, or what the stage before hands on. goals:
    targets on the last stage, else gradients of what this stage hands on. places: in the run's order, int64."""

    inputs: Carry
    goals: Carry
    places: Tensor

    def at(self, rows: slice) -> "Samples":
        """Some of them."""
        return Samples(_rows(self.inputs, rows), _rows(self.goals, rows), self.places[rows])


Value = Callable[[Mapping[str, Tensor], Samples], Tensor]
"""(parameters, one sample, [1, ...] each) → what is differentiated, []."""


def _rows(carry: Carry, rows: slice) -> Carry:
    return carry[rows] if isinstance(carry, Tensor) else tuple(x[rows] for x in carry)


def by_vmap(value: Value, params: Mapping[str, Tensor], samples: Samples) -> tuple[Grads, Tensor]:
    """(gradients, values [n]), all samples at once. Raises UsageError P41 for a model that torch.func cannot map."""
    alone = lambda carry: carry[None] if isinstance(carry, Tensor) else tuple(x[None] for x in carry)
    of_one = grad_and_value(
        lambda p, inputs, goals, place: value(p, Samples(alone(inputs), alone(goals), place[None]))
    )
    try:
        grads, values = vmap(of_one, in_dims=(None, 0, 0, 0), randomness="error")(
            {name: p.detach() for name, p in params.items()}, *samples
        )
    except RuntimeError as error:
        if not any(word in str(error) for word in ("vmap", "functorch")):
            raise  # memory that is not there, say
        raise UsageError(
            f"torch.func cannot compute this model's gradients by sample: {str(error).splitlines()[0]}",
            where="model, privacy",
            likely="it branches on numbers, draws random ones, or has an autograd function without vmap",
            fix="--train.micro_batch 1, with which samples are computed one after the other",
            code="P41",
        ) from error
    return dict(grads), values


def one_by_one(value: Value, params: Mapping[str, Tensor], samples: Samples) -> tuple[Grads, Tensor]:
    """As `by_vmap`, by autograd, which serves any model. params: those that autograd follows."""
    count = len(samples.places)
    grads = {name: p.new_zeros((count, *p.shape)) for name, p in params.items()}
    values = []
    for i in range(count):
        one = value(params, samples.at(slice(i, i + 1)))
        values.append(one.detach())
        each = torch.autograd.grad(one, [*params.values()], allow_unused=True)
        for name, grad in zip(params, each, strict=True):
            if grad is not None:
                grads[name][i] = grad
    return grads, torch.stack(values)


def dot(y: Carry, grads: Sequence[Tensor]) -> Tensor:
    """[]: of what a stage hands on with its gradients; the gradient of this number is the stage's share of the loss's.
    grads: of those tensors that are floating."""
    floating = [x for x in tensors_of(y) if x.is_floating_point()]
    return torch.stack([(x * g).sum() for x, g in zip(floating, grads, strict=True)]).sum()


def squares_of(grads: Sequence[Tensor], count: int, device: torch.device) -> Tensor:
    """[n], float64: the squared norm of the gradient of each of `count` samples. grads: [n, ...] each."""
    norms = [torch.zeros(count, dtype=torch.float64, device=device)]
    for grad in grads:
        # A CPU copies what it widens, so one sample at a time.
        parts = grad.flatten(1).split(count if is_apart(grad) else 1)
        norms.append(
            torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts])
        )
    return torch.stack(norms).square().sum(0)


def clipping(squares: Tensor, bound: float) -> Tensor:
    """[n]: by what each sample's gradient is multiplied, so that its norm is at most `bound`; 0 where it has a number
    that is none. squares: of the norms of whole gradients, [n]."""
    norm = squares.sqrt()
    return torch.where(norm.isfinite(), (bound / norm).clamp(max=1.0), 0.0)


def weighted_sum(factors: Tensor, grads: Tensor) -> Tensor:
    """Σ factor · gradient over samples, [...]. A gradient with factor 0 adds nothing, whatever it holds. grads:
    [n, ...]."""
    if not bool(factors.all()):
        grads, factors = grads[factors > 0.0], factors[factors > 0.0]
    return torch.tensordot(factors.to(grads.dtype), grads, dims=1)

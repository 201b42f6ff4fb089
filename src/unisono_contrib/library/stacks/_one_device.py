"""What one device makes of a user's step: shares of the gradient, and the weights after each step."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from unisono.library.proof_rank import NOISE, Coarsest
from unisono_contrib.library.stacks._step import TrainingStep, numbers_of, total, trainable

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The micro-batches of one step, and the part of the loss that each is; the parts add up to 1."""

    batches: Sequence[Any]
    parts: Sequence[float]


class OneDevice:
    """One device in the midst of a user's training. groups: ranks that have data of their own. micros: micro-batches of
    each. noise: whether gradients carry as much noise as another order of their sums."""

    def __init__(self, step: TrainingStep, groups: int, micros: int, noise: bool = False) -> None:
        torch.manual_seed(0)
        self.step, self.groups, self.micros = step, groups, micros
        self.model = step.model()
        self.optimizer: Optimizer = step.optimizer(list(trainable(self.model).values()))
        self.reached: set[str] = set()  # parameters with a gradient in the last batch
        self._noise = torch.Generator().manual_seed(1) if noise else None

    def batch(self, number: int) -> GlobalBatch:
        """Return the global batch of a step, counted from 0."""
        batches = [self.step.batch(n) for n in numbers_of(number, self.groups, self.micros)]
        weights = [float(self.step.weight(batch)) for batch in batches]
        return GlobalBatch(batches, [w / total(weights) for w in weights])

    def gradient(self, batch: Any, part: float = 1.0) -> dict[str, Tensor]:
        """Return `part` times the gradient of one micro-batch, at the weights of now; zeros where there is none."""
        params = trainable(self.model)
        loss = part * self.step.loss(self.model, batch)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        self.reached |= {name for name, g in zip(params, grads, strict=True) if g is not None}
        return {
            name: torch.zeros_like(p) if g is None else g.detach()
            for (name, p), g in zip(params.items(), grads, strict=True)
        }

    def shares(self, batch: GlobalBatch, coarsest: Coarsest | None = None) -> list[dict[str, Tensor]]:
        """Return what each micro-batch adds to the gradient."""
        self.reached = set()
        with coarsest or nullcontext():
            return [self.gradient(x, part) for x, part in zip(batch.batches, batch.parts, strict=True)]

    def update(
        self, gradient: Tensors, clip: float | None = None, coarsest: Coarsest | None = None, eps: float = 0.0
    ) -> None:
        """Clip, and make a step of the optimiser, which skips what no micro-batch has used. clip: in the place of the
        step's. eps: how coarsely a step computes inside, which noise has to reach to show what rounding does."""
        params = trainable(self.model)
        for name, p in params.items():
            p.grad = gradient[name].clone() if name in self.reached else None
        self._perturb([p.grad for p in params.values() if p.grad is not None], eps)
        limit = self.step.clip if clip is None else clip
        if limit:
            torch.nn.utils.clip_grad_norm_(params.values(), limit)
        with coarsest or nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of now."""
        return {name: p.detach().clone() for name, p in trainable(self.model).items()}

    def copy(self) -> "OneDevice":
        """Return another device, in the same midst."""
        twin = copy.copy(self)
        twin.model, twin.optimizer = copy.deepcopy((self.model, self.optimizer))
        return twin

    def _perturb(self, grads: Sequence[Tensor], eps: float) -> None:
        if self._noise is None:
            return
        largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
        for g in grads:
            drawn = 2 * torch.rand(g.shape, generator=self._noise, dtype=torch.float64) - 1
            inside = eps * float(g.abs().max()) if g.numel() and eps > torch.finfo(g.dtype).eps else 0.0
            g.add_((max(NOISE * torch.finfo(g.dtype).eps * largest, inside) * drawn).to(g))


def added(shares: Sequence[Tensors]) -> dict[str, Tensor]:
    """The sum of gradients, in float64 on its way."""
    return {
        name: torch.stack([share[name].double() for share in shares]).sum(0).to(x)
        for name, x in shares[0].items()
    }


def multiplied(gradient: Tensors, by: float) -> dict[str, Tensor]:
    """A gradient times a number."""
    return {name: by * x for name, x in gradient.items()}


def scaled(shares: Sequence[Tensors], times: Sequence[float]) -> list[dict[str, Tensor]]:
    """Shares of a gradient, each multiplied by a number of its own."""
    return [multiplied(share, k) for share, k in zip(shares, times, strict=True)]


def other_means(parts: Sequence[float], micros: int) -> dict[str, list[float]]:
    """How often micro-batches count where a mean is taken over other things than their targets, in words. parts: of the
    mean over all targets, of each micro-batch, those of one rank one after the other."""
    many = len(parts)
    ranks = [sum(parts[i - i % micros : i - i % micros + micros]) for i in range(many)]
    turns = [sum(parts[i % micros :: micros]) for i in range(many)]
    sizes = {
        "micro-batches are averaged as if all had as many targets": [many * part for part in parts],
        "ranks are averaged as if all had as many targets": [many / micros * rank for rank in ranks],
        "what ranks accumulate is averaged as if all turns had as many targets": [micros * t for t in turns],
    }
    # What has no targets adds nothing, however often.
    means = {text: [1 / size if size else 1.0 for size in each] for text, each in sizes.items()}
    return {text: mean for text, mean in means.items() if max(mean) - min(mean) > 1e-9}


def clipped_share(shares: Sequence[Tensors], clip: float) -> float:
    """By how much clipping multiplies the gradient that these shares add up to."""
    if not clip:
        return 1.0
    norm = torch.stack([x.double().norm() for x in added(shares).values()]).norm().item()
    return min(1.0, clip / (norm + 1e-6))


def alone(step: TrainingStep, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Leave shares of each step's gradient, weights around each step, and weights had gradients carried noise."""
    folder, backward, coarsest = Path(argument["folder"]), Coarsest(), Coarsest()
    right, noisy = (OneDevice(step, argument["groups"], argument["micros"], noise) for noise in (False, True))
    save_file(right.weights(), folder / "one-weight-0")
    clips, parts = [], []
    for number in range(argument["steps"]):
        batch = right.batch(number)
        shares = right.shares(batch, backward)
        parts.append(list(batch.parts))
        clips.append(clipped_share(shares, step.clip) if argument["clipped"] else 1.0)
        for index, share in enumerate(shares):
            kept = {name: (clips[-1] * x).contiguous() for name, x in share.items()}
            save_file(kept, folder / f"share-{number}-{index}")
        right.update(added(shares), coarsest=coarsest)
        noisy.update(added(noisy.shares(noisy.batch(number))), eps=coarsest.eps)
        save_file(right.weights(), folder / f"one-weight-{number + 1}")
        save_file(noisy.weights(), folder / f"noisy-weight-{number + 1}")
    return {
        "order": list(right.weights()),
        "backward": backward.name,
        "coarsest": coarsest.name,
        "clips": clips,
        "parts": parts,
        "clip": step.clip if argument["clipped"] else 0.0,
    }

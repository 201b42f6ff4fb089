"""DP-SGD (Abadi et al., "Deep learning with differential privacy", 2016) in the player's place.

Each sample's gradient is computed by itself and clipped. A rank adds up those of its leaves; one rank adds noise to its
sum, once an update; then the sum leaves as any gradient does, and replicas add theirs up. So neither the number of
ranks nor that of micro-batches changes the noise, and every rank has the same gradient to the bit. The sum is over the
expected batch, a constant: the size of the real one is a secret too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from unisono.models.noise import Noise
from unisono.parallel.cut import Stage
from unisono.parallel.params import Slot
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import BackwardCall, Leaf, Player
from unisono.programs.pipeline import Action
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.step.batch_norm import changed_buffers
from unisono.train.step.run import Run
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.noise import ACCOUNTANTS, Accountant, noise_for
from unisono_contrib.privacy.stream import normals

LOOKS = 20
"""Values of the tight epsilon in a run; a step between two tells the next, which is larger."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may reveal, and how it is counted. noise: over the norm bound. rate: expected batch over samples.
    poisson: whether each step draws its samples anew; else batches follow each other, and a sample is in one of them
    once an epoch. steps: of the whole run."""

    noise: float
    rate: float
    poisson: bool
    delta: float
    accountant: Accountant
    steps: int

    def epsilon(self, steps: int) -> float:
        """That of the first `steps` updates; inf without noise."""
        return self.accountant(
            [SampledGaussian(self.noise, *counted(self.rate, self.poisson, steps))], self.delta
        )

    def mark(self, step: int) -> int:
        """The next of `LOOKS` marks in the run from `step` on. Its epsilon, which is larger, holds for `step` too."""
        every = max(1, self.steps // LOOKS)
        return min(max(step, self.steps), math.ceil(step / every) * every)

    def says(self, clip: float) -> str:
        """What the whole run reveals, in a line."""
        drawn = f"batches drawn at rate {self.rate:.4g}" if self.poisson else "shuffled batches"
        whole = f"epsilon {self.epsilon(self.steps):.4g} at delta {self.delta:g} after {self.steps} steps"
        return f"privacy: noise {self.noise:.4g}, gradients clipped to {clip:g}, {drawn}: {whole}"


def counted(rate: float, poisson: bool, steps: int) -> tuple[float, int]:
    """(probability that a noisy step includes a sample, number of such steps), as an accountant counts `steps`."""
    return (rate, steps) if poisson else (1.0, math.ceil(steps * rate - 1e-9))


def budget_of(section: Any, global_batch: int, samples: int, steps: int) -> Budget:
    """That of a `[privacy]` section (`config.sections.privacy.PrivacyConfig`). The noise follows from target_epsilon
    where that is said."""
    rate, poisson = global_batch / samples, section.sampling == "poisson"
    accountant, noise = ACCOUNTANTS[section.accountant], section.noise
    if noise is None:
        noise = noise_for(section.target_epsilon, section.delta, *counted(rate, poisson, steps), accountant)
    return Budget(noise, rate, poisson, section.delta, accountant, steps)


def made_private(run: Run, clip: float, budget: Budget, key: bytes) -> Run:
    """The run with gradients of samples clipped and noise in each update, which tells its epsilon. Every rank calls it.
    Raises UsageError P41 for a model whose samples have no gradients of their own."""
    if not isinstance(run.player, StagePlayer) or len(run.local.stages) != 1:
        raise TypeError("gradients of samples are computed by the player of one whole model")
    (stage,) = run.local.stages.values()
    _refuse(stage, run)
    deviation = budget.noise * clip if budget.noise else 0.0  # without noise the bound may be infinite
    run.player = PrivatePlayer(run, run.player, stage, clip, deviation, key)
    if run.mesh.rank == 0:
        run.local = replace(run.local, notes=(*run.local.notes, budget.says(clip)))
    epsilon = cache(budget.epsilon)

    def tell(verdict: Verdict) -> Mapping[str, Any]:
        if run.mesh.rank:
            return {}
        spent = epsilon(budget.mark(run.step + 1))
        return {"epsilon": spent if math.isfinite(spent) else None}

    run.update = replace(run.update, after=(*run.update.after, tell))
    return run


def _refuse(stage: Stage, run: Run) -> None:
    norms = [name for name, m in stage.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    shared = [*changed_buffers(stage, run.local.routers)]
    sparse = [slot.name for slot in run.local.slots if slot.sparse]
    for names, why in (
        ([*run.local.routers], "routes the samples of a batch together"),
        ([*norms, *shared], "mixes the samples of a batch, or keeps what it has seen of them"),
        (sparse, "has gradients of rows, not of samples"),
    ):
        if names:
            raise UsageError(
                f"{names[0]} {why}, so no sample has a gradient of its own, and [privacy] could not bound it",
                where="model, privacy",
                fix="group norm or layer norm in its place; or a model without it",
                code="P41",
            )


class PrivatePlayer(Player):
    """Plays a step with gradients of samples. `bound`: of their norms. `deviation`: of the noise in their sum."""

    def __init__(
        self, run: Run, inner: StagePlayer, stage: Stage, bound: float, deviation: float, key: bytes
    ) -> None:
        self.run, self.inner, self.stage = run, inner, stage
        self.bound, self.deviation, self.key = bound, deviation, key
        self.slots = [slot for slot in run.local.slots if slot.live.requires_grad]
        learning = {slot.name for slot in self.slots}
        self.owners = {alias: owner for alias, owner in run.local.owners.items() if alias in learning}

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        if not any(action.kind == "B" for action in row):
            return self.inner.play(row, leaves, weight, seed)
        expected = self.run.replica.global_batch
        losses = torch.zeros(len(leaves), dtype=self.inner.dtype, device=self.inner.device)
        sums = {slot.name: torch.zeros_like(slot.live) for slot in self.slots}
        for micro, leaf in enumerate(leaves):
            with self.run.recorder.span("forward", micro=micro, stage=0):
                losses[micro] = self._add_leaf(sums, leaf, seed) * (leaf.scale / expected)
        if self.deviation and self.run.mesh.dp.index == 0:
            self._add_noise(sums)
        with self.run.recorder.span("backward", micro=len(leaves) - 1, stage=0):
            self._hand_over([(slot, sums[slot.name].div_(expected)) for slot in self.slots])
        return losses

    def _add_leaf(self, sums: Mapping[str, Tensor], leaf: Leaf, seed: int | None) -> Tensor:
        """Adds a leaf's clipped gradients to `sums`; its loss, summed over samples, each the mean of its targets."""
        together = self.run.replica.micro_batch > 1
        size = len(leaf.samples)
        parts = [range(size)] if together and size else [range(i, i + 1) for i in range(size)]
        total = torch.zeros((), dtype=self.inner.dtype, device=self.inner.device)
        for part in parts:
            rows = slice(part.start, part.stop)
            compute = self._by_vmap if together else self._alone
            grads, losses = compute(leaf.inputs[rows], leaf.targets[rows], leaf.samples[rows], seed)
            # An alias of a tied weight is the same number: a sample's gradient is the sum of both uses.
            for alias, owner in self.owners.items():
                grads[owner] = grads[owner] + grads.pop(alias)
            factors = clipping(list(grads.values()), self.bound)
            for name, grad in grads.items():
                sums[name].add_(weighted_sum(factors, grad))
            total += losses[factors > 0.0].sum()
        return total

    def _loss(
        self, params: Mapping[str, Tensor], x: Tensor, targets: Tensor, place: Tensor, seed: int | None
    ) -> Tensor:
        """Of one sample, mean over its targets."""
        noise = None if seed is None else Noise(seed, place[None])
        with self.inner.computing():
            y = functional_call(self.stage, dict(params), (x[None], noise))
            return self.stage.loss(y, targets[None]) / targets.numel()

    def _by_vmap(
        self, inputs: Tensor, targets: Tensor, places: Tensor, seed: int | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """({name: [n, ...]}, losses [n]) of all samples at once."""
        params = {slot.name: slot.live.detach() for slot in self.slots}
        of_one = grad_and_value(lambda p, x, t, place: self._loss(p, x, t, place, seed))
        try:
            grads, losses = vmap(of_one, in_dims=(None, 0, 0, 0), randomness="error")(
                params, inputs, targets, places
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
        return dict(grads), losses

    def _alone(
        self, inputs: Tensor, targets: Tensor, places: Tensor, seed: int | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """As `_by_vmap`, of one sample, by autograd."""
        loss = self._loss({}, inputs[0], targets[0], places[0], seed)
        lives = [slot.live for slot in self.slots]
        grads = torch.autograd.grad(loss, lives, allow_unused=True)
        whole = (torch.zeros_like(p) if g is None else g for p, g in zip(lives, grads, strict=True))
        return {slot.name: g[None] for slot, g in zip(self.slots, whole, strict=True)}, loss.detach()[None]

    @torch.no_grad()
    def _add_noise(self, sums: Mapping[str, Tensor]) -> None:
        """Once an update: a function of key, step and parameter, drawn by one rank."""
        for name, total in sums.items():
            if name not in self.owners:
                drawn = torch.from_numpy(normals(self.key, "noise", self.run.step, name, total.numel()))
                total.add_((self.deviation * drawn).view_as(total).to(total))

    def _hand_over(self, grads: Sequence[tuple[Slot, Tensor]]) -> None:
        """As the last backward of a step leaves gradients: buckets fill by the parameters' hooks, and depart."""
        self.inner.before_backward(BackwardCall(0, 0, True, True))
        torch.autograd.backward([slot.live for slot, _ in grads], [grad for _, grad in grads])


def clipping(grads: Sequence[Tensor], bound: float) -> Tensor:
    """[n]: by what each sample's gradient is multiplied, so that its norm is at most `bound`; 0 where it has a number
    that is none. grads: [n, ...] each."""
    norms = [torch.linalg.vector_norm(grad.flatten(1), dim=1, dtype=torch.float64) for grad in grads]
    norm = torch.stack(norms).square().sum(0).sqrt()
    return torch.where(norm.isfinite(), (bound / norm).clamp(max=1.0), 0.0)


def weighted_sum(factors: Tensor, grads: Tensor) -> Tensor:
    """Σ factor · gradient over samples, [...]. A gradient with factor 0 adds nothing, whatever it holds. grads:
    [n, ...]."""
    if not bool(factors.all()):
        grads, factors = grads[factors > 0.0], factors[factors > 0.0]
    return torch.tensordot(factors.to(grads.dtype), grads, dims=1)

"""DP-SGD (Abadi et al., "Deep learning with differential privacy", 2016) in the player's place.

Each sample's gradient is computed by itself and clipped. A rank adds up those of its leaves; one replica adds noise to
its sum, once an update; then the sum leaves as any gradient does, and replicas add theirs up. So neither the number of
ranks nor that of micro-batches changes the noise, and every replica has the same gradient to the bit. The sum is over
the expected batch, a constant: the size of the real one is a secret too.

Where a replica is cut, a sample's squared norm is the sum of those of its parts. Under `tp` and `pp` ranks add these
up, and then each clips its part by the whole norm. Under `pp` stages first learn what crosses their boundaries, of a
few samples at a time. Under `shard` weights are gathered for a step, so a rank has whole gradients of its own samples,
and the clipped sums are scattered. Noise of a part is that part of the whole tensor's noise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from unisono.models.noise import Noise
from unisono.parallel.cut import Stage
from unisono.parallel.params import Slot
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import BackwardCall, Leaf, Player
from unisono.parallel.tensor import scatter_dealt
from unisono.programs.pipeline import Action
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.data.feed import Micro
from unisono.train.step.batch_norm import changed_buffers
from unisono.train.step.run import Run
from unisono_contrib.parallel.crossed import CrossedPlayer
from unisono_contrib.parallel.gathered import gathered
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.noise import ACCOUNTANTS, Accountant, noise_for
from unisono_contrib.privacy.stream import normals
from unisono_contrib.train.step.by_sample import (
    Grads,
    Samples,
    by_vmap,
    clipping,
    dot,
    one_by_one,
    squares_of,
    weighted_sum,
)

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
    """The run with gradients of samples clipped and noise in each update, which tells its epsilon. Every rank calls it,
    or it hangs. Raises UsageError P41 for a model whose samples have no gradients of their own."""
    if not isinstance(run.player, StagePlayer):
        raise TypeError("gradients of samples are computed by the player of a step's stages")
    for stage in run.local.stages.values():
        _refuse(stage, run)
    deviation = budget.noise * clip if budget.noise else 0.0  # without noise the bound may be infinite
    run.player = PrivatePlayer(run, run.player, clip, deviation, key)
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
    size = run.replica.micro_batch
    mixed = [
        f"stage {i}" for i, wire in run.local.wires.items() if any(t.shape[:1] != (size,) for t in wire.carry)
    ]
    for names, why in (
        ([*run.local.routers], "routes the samples of a batch together"),
        ([*norms, *shared], "mixes the samples of a batch, or keeps what it has seen of them"),
        (sparse, "has gradients of rows, not of samples"),
        (mixed, "hands on tensors whose first dim is not that of the samples"),
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

    def __init__(self, run: Run, inner: StagePlayer, bound: float, deviation: float, key: bytes) -> None:
        """Every rank makes one, or it hangs."""
        self.run, self.inner, self.stages = run, inner, run.local.stages
        self.bound, self.deviation, self.key = bound, deviation, key
        self.slots = {slot.name: slot for slot in run.local.slots if slot.live.requires_grad}
        self.owners = {a: o for a, o in run.local.owners.items() if a in self.slots and o in self.slots}
        mesh = run.mesh
        self.counted = {name for name, slot in self.slots.items() if slot.counted(mesh.at)}
        axes = frozenset(axis for axis in ("pp", "tp") if getattr(mesh.shape, axis) > 1)
        self.parts = mesh.over(axes)  # the ranks that have parts of one sample's gradient
        self.crossed = CrossedPlayer(inner)
        # Autograd functions with communication inside have no rule for vmap.
        mapped = run.replica.micro_batch > 1 and mesh.shape.tp == 1
        self.compute = by_vmap if mapped else one_by_one

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        if not any(action.kind == "B" for action in row):
            return self.inner.play(row, leaves, weight, seed)
        expected = self.run.replica.global_batch
        losses = torch.zeros(len(leaves), dtype=self.inner.dtype, device=self.inner.device)
        with ExitStack() as whole:
            for stage in self.stages.values():
                whole.enter_context(gathered(stage))
            params = {i: self._learning(stage) for i, stage in self.stages.items()}
            sums = {name: torch.zeros_like(p) for held in params.values() for name, p in held.items()}
            for micro, samples in self._few_at_a_time(row, leaves, seed):
                with self.run.recorder.span("forward", micro=micro, stage=min(self.stages)):
                    loss = self._add_clipped(sums, params, samples, seed)
                    losses[micro] += loss * (leaves[micro].scale / expected)
        with self.run.recorder.span("backward", micro=len(leaves) - 1, stage=min(self.stages)):
            grads = {name: self._noised(self.slots[name], sums.pop(name)) for name in [*sums]}
            self._hand_over({name: grad.div_(expected) for name, grad in grads.items()})
        return losses

    def _learning(self, stage: Stage) -> dict[str, nn.Parameter]:
        return {name: p for name, p in stage.named_parameters() if name in self.slots}

    def _few_at_a_time(
        self, row: Sequence[Action], leaves: Sequence[Leaf], seed: int | None
    ) -> Iterator[tuple[int, Mapping[int, Samples]]]:
        """(leaf, samples as each stage sees them), at most `micro_batch` at a time; leaves of Poisson batches may have
        more, or none."""
        size = self.run.replica.micro_batch
        most = max(len(leaf.samples) for leaf in leaves)
        for first in range(0, most, size):
            parts = [_part(leaf, slice(first, first + size)) for leaf in leaves]
            if self.run.mesh.pp.size == 1:
                every = [{0: Samples(part.inputs, part.targets, part.samples)} for part in parts]
            else:
                every = self._across(row, parts, seed)
            yield from ((micro, each) for micro, each in enumerate(every) if len(parts[micro].samples))

    def _across(
        self, row: Sequence[Action], parts: Sequence[Micro], seed: int | None
    ) -> list[dict[int, Samples]]:
        """What this rank's stages see of these samples of each leaf."""
        size = self.run.replica.micro_batch
        full = [_padded(part, size) for part in parts]  # as large as messages are
        share = 1.0 / max(1, full[0].targets[0].numel())
        inputs, grads = self.crossed.play_across(row, full, share, seed)
        return [
            {
                i: Samples(
                    part.inputs if stage.first else self.inner.post.wires[i - 1].unpacked(inputs[i, micro]),
                    part.targets if stage.last else grads[i, micro],
                    full[micro].samples,
                ).at(slice(len(part.samples)))
                for i, stage in self.stages.items()
            }
            for micro, part in enumerate(parts)
        ]

    def _add_clipped(
        self,
        sums: Mapping[str, Tensor],
        params: Mapping[int, Mapping[str, nn.Parameter]],
        samples: Mapping[int, Samples],
        seed: int | None,
    ) -> Tensor:
        """Adds the clipped gradients of a few samples to `sums`; their loss, a sum of the mean of each sample's
        targets, 0 where the last stage is elsewhere."""
        grads: Grads = {}
        losses = torch.zeros((), dtype=self.inner.dtype, device=self.inner.device)
        for i, stage in self.stages.items():
            more, values = self.compute(partial(self._value, i, seed), params[i], samples[i])
            grads |= more
            losses = values if stage.last else losses
        self._complete(grads)
        counted = [grad for name, grad in grads.items() if name in self.counted]
        squares = squares_of(counted, len(samples[min(samples)].places), losses.device)
        factors = clipping(self.parts.all_reduce(squares), self.bound)
        for name, grad in grads.items():
            sums[name].add_(weighted_sum(factors, grad))
        return losses[factors > 0.0].sum() if losses.dim() else losses

    def _value(self, i: int, seed: int | None, params: Mapping[str, Tensor], samples: Samples) -> Tensor:
        """Of one sample: on the last stage the loss, mean over its targets; elsewhere what has its gradient."""
        stage = self.stages[i]
        noise = None if seed is None else Noise(seed, samples.places)
        with self.inner.computing():
            y = functional_call(stage, dict(params), (samples.inputs, noise))
            if isinstance(samples.goals, Tensor):
                return stage.loss(y, samples.goals) / samples.goals.numel()
            return dot(self.inner.post.wires[i].packed(y), samples.goals)

    def _complete(self, grads: Grads) -> None:
        """Add up what is one number of the model, and has a gradient in several places: uses of a tied weight, and
        parameters of which ranks of `tp` see some positions each."""
        for alias, owner in self.owners.items():
            if alias in grads:
                grads[owner] = grads[owner] + grads.pop(alias)
        for tie in self.run.gradients.ties:
            if len(tie.here) == 1:
                name = tie.here[0].name
                grads[name] = tie.group.all_reduce(grads[name].contiguous())
        for axes in sorted({slot.sum_over for slot in self.slots.values() if slot.sum_over}, key=sorted):
            names = [name for name in grads if self.slots[name].sum_over == axes]
            flat = torch.cat([grads[name].flatten(1) for name in names], 1)
            parts = (
                self.run.mesh.over(axes).all_reduce(flat).split([grads[name][0].numel() for name in names], 1)
            )
            grads |= {name: x.view_as(grads[name]) for name, x in zip(names, parts, strict=True)}

    @torch.no_grad()
    def _noised(self, slot: Slot, total: Tensor) -> Tensor:
        """This rank's part of the sum over its replica, with its part of the noise; zeros on ranks whose part another
        one adds. total: over this rank's samples."""
        if isinstance(slot.live, DTensor):
            total = scatter_dealt(total, group := self.run.mesh.states, _rows_of(len(total), group.size))
        if slot.alias or any(self.run.mesh.at[axis] for axis in slot.sum_over):
            return torch.zeros_like(total)
        if self.deviation and self.run.mesh.dp.index == 0:
            total += self._noise(slot).to(total)
        return total

    def _noise(self, slot: Slot) -> Tensor:
        """Once an update: a function of key, step and parameter, of which a rank takes its part."""
        drawn = torch.from_numpy(normals(self.key, "noise", self.run.step, slot.name, math.prod(slot.shape)))
        box = tuple(slice(a, a + size) for a, size in zip(slot.start, slot.master.shape, strict=True))
        return self.deviation * drawn.view(slot.shape)[box]

    def _hand_over(self, grads: Mapping[str, Tensor]) -> None:
        """As the last backward of a step leaves gradients: buckets fill by the parameters' hooks, and depart."""
        self.inner.before_backward(BackwardCall(min(self.stages), 0, True, True))
        plain = []
        for name, grad in grads.items():
            live = self.slots[name].live
            if isinstance(live, DTensor):
                how = {"shape": live.shape, "stride": live.stride(), "run_check": False}
                live.grad = DTensor.from_local(grad, live.device_mesh, live.placements, **how)
            else:
                plain.append((live, grad))
        if plain:
            torch.autograd.backward([live for live, _ in plain], [grad for _, grad in plain])


def _part(leaf: Leaf, rows: slice) -> Micro:
    """Some samples of a leaf. Raises UsageError P41 where its windows hold several documents."""
    if leaf.documents is not None:
        raise UsageError(
            "windows hold several documents, and [privacy] bounds what a whole window adds",
            where="data, privacy",
            fix="windows of one document",
            code="P41",
        )
    return Micro(leaf.inputs[rows], leaf.targets[rows], leaf.samples[rows])


def _padded(part: Micro, size: int) -> Micro:
    """With samples of zeros behind, so that there are `size`."""
    more = size - len(part.samples)
    with_zeros = lambda x: torch.cat((x, x.new_zeros((more, *x.shape[1:]))))
    return (
        Micro(with_zeros(part.inputs), with_zeros(part.targets), with_zeros(part.samples)) if more else part
    )


def _rows_of(rows: int, ranks: int) -> list[int]:
    """The first row of each rank's part, as FSDP2 shards, and the end of the last one."""
    each = -(-rows // ranks)
    return [min(i * each, rows) for i in range(ranks + 1)]

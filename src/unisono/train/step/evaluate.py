"""The loss on batches that nothing is learnt from."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.player import Leaf
from unisono.parallel.shard import forget_gathered
from unisono.spec.training import Metric
from unisono.train.step.run import Run
from unisono.train.step.train_step import targets_of


@torch.no_grad()
def evaluate(
    run: Run, batches: Sequence[Sequence[Leaf]], metrics: Sequence[Metric] = ()
) -> tuple[float, dict[str, float]]:
    """(mean loss in nats per target over the batches of all data ranks, metrics by name); the same on every rank. Only
    targets that count are counted.

    Where the policy prescribes an order of sums, each leaf of a batch has a place of its own, as in training: no bit
    depends on which rank computed it. Every rank of the run calls it, or it hangs.
    """
    places = run.gradients.line.places
    totals = torch.zeros(1 + len(metrics), places.count, dtype=torch.float64, device=run.local.device)
    places_here = torch.tensor(places.here, device=totals.device)
    run.local.train(False)
    count = math.fsum(targets_of(run, leaves) / leaves[0].scale for leaves in batches)
    for leaves in batches:
        weight = 1.0 / (leaves[0].scale * count)
        with _counted(run, metrics, totals[1:], 1.0 / count) if metrics else nullcontext():
            losses = run.player.play(run.eval_row, leaves, weight, None).double()
        totals[0, places_here] += losses if places.count > 1 else losses.sum()
    run.local.train(True)
    if not places.counted:
        totals.zero_()
    loss, *means = (math.fsum(row) for row in run.mesh.world.all_reduce(totals).tolist())
    return loss, {m.name: m.value(mean, loss) for m, mean in zip(metrics, means, strict=True)}


@contextmanager
def _counted(run: Run, metrics: Sequence[Metric], means: Tensor, weight: float) -> Iterator[None]:
    """While it lasts, whoever computes a leaf's loss also adds what the metrics count, times `weight`, to `means`
    [metrics, places of leaves]. Leaves come in order."""
    leaves = itertools.cycle(run.gradients.line.places.here)
    heads = [(stage, stage.loss) for stage in run.local.stages.values() if stage.last]
    for stage, _ in heads:

        def both(y: Tensor, targets: Tensor, loss: Any = stage.loss, whole: Any = stage.whole) -> Tensor:
            logits, place = whole(y), next(leaves)
            for row, metric in enumerate(metrics):
                count = torch.as_tensor(metric.count(logits, targets), dtype=means.dtype, device=means.device)
                means[row, place] += weight * count  # a whole number times a weight would be a float32
            return loss(y, targets)

        stage.loss = both
    try:
        yield
    finally:
        for stage, loss in heads:
            stage.loss = loss


@contextmanager
def central_weights(run: Run) -> Iterator[None]:
    """While it lasts, every rank has "the" weights of the run, those of `Sync.center`, in the place of its replica's
    own; or the averages, where validations use these. Every rank calls it, or it hangs."""
    update = run.update
    with weights_being(run, update.averages if update.validates_averages else run.sync.center()):
        yield


@contextmanager
def weights_being(run: Run, values: Mapping[str, Tensor]) -> Iterator[None]:
    """While it lasts, this rank's parameters have these values, by a slot's name. Every rank calls it, or it hangs."""
    before = {slot.name: at_home(slot.master).clone() for slot in run.local.slots if slot.name in values}
    try:
        fill(run, values)
        yield
    finally:
        fill(run, before)


@torch.no_grad()
def fill(run: Run, values: Mapping[str, Tensor]) -> None:
    """Give this rank's parameters these values, by a slot's name; rounded to the parameter's dtype."""
    for slot in run.local.slots:
        if slot.name in values:
            at_home(slot.master).copy_(values[slot.name])
    forget_gathered(run.local.stages.values())

"""The loss on batches that nothing is learnt from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.player import Leaf
from unisono.spec.training import Metric
from unisono.train.run import Run
from unisono.train.step import targets_of


@torch.no_grad()
def evaluate(
    run: Run, batches: Sequence[Sequence[Leaf]], metrics: Sequence[Metric] = ()
) -> tuple[float, dict[str, float]]:
    """(mean loss in nats per target over the batches of all data ranks, metrics by name); the same on every rank.

    Every rank of the run calls it, or it hangs.
    """
    mesh = run.mesh
    total = torch.zeros(1 + len(metrics), dtype=torch.float64, device=run.local.device)
    run.local.train(False)
    for leaves in batches:
        weight = 1.0 / (targets_of(run, leaves) * len(batches))
        with _counted(run, metrics, total[1:], weight) if metrics else nullcontext():
            total[0] += run.player.play(run.eval_row, leaves, weight, None).sum()
    run.local.train(True)
    if not run.gradients.line.places.counted:
        total.zero_()
    loss, *means = mesh.world.all_reduce(total).tolist()
    return loss, {m.name: m.value(mean, loss) for m, mean in zip(metrics, means, strict=True)}


@contextmanager
def _counted(run: Run, metrics: Sequence[Metric], means: Tensor, weight: float) -> Iterator[None]:
    """While it lasts, whoever computes a loss also adds what the metrics count, times `weight`, to `means`."""
    heads = [(stage, stage.loss) for stage in run.local.stages.values() if stage.last]
    for stage, _ in heads:

        def both(y: Tensor, targets: Tensor, own: Any = stage.loss, whole: Any = stage.whole) -> Tensor:
            logits = whole(y)
            for place, metric in enumerate(metrics):
                means[place] += weight * metric.count(logits, targets)
            return own(y, targets)

        stage.loss = both
    try:
        yield
    finally:
        for stage, own in heads:
            stage.loss = own

"""Which micro-batches made a loss that is not a number, and a step without them.

A loss that is not a number stays one when it is multiplied by zero, and so does its gradient. So a micro-batch is not
weighed down but *blanked*: zeros stand for its inputs and targets, its loss counts for nothing, and the losses of the
others count for so much more that the step is a mean over all targets that are left.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.parallel.offload.lending import at_home
from unisono.parallel.player import Leaf
from unisono.train.data.feed import Feed, Micro
from unisono.train.step.batch_norm import NormedUpdate
from unisono.train.step.run import Run

LOG = "quarantine.jsonl"


class Sieve(Feed):
    """The leaves of a feed; of those that were left out, blanks."""

    def __init__(self, inner: Feed) -> None:
        self.inner = inner
        self._without: dict[int, frozenset[int]] = {}

    def without(self, step: int) -> frozenset[int]:
        """Leaves that are left out of step `step`."""
        return self._without.get(step, frozenset())

    def leave_out(self, step: int, leaves: Collection[int]) -> None:
        """From now on, whenever this step comes."""
        self._without[step] = self.without(step) | frozenset(leaves)

    def forget_from(self, step: int) -> None:
        """Steps from this one on come again whole."""
        self._without = {at: left for at, left in self._without.items() if at < step}

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        found = self.inner.fetch(step, leaves)
        if not (left := self.without(step)):
            return found
        counts = 1.0 / (1.0 - self.inner.share(step, left))
        return [
            blank(micro) if leaf in left else replace(micro, scale=micro.scale * counts)
            for leaf, micro in zip(leaves, found, strict=True)
        ]

    def samples_of(self, step: int, leaf: int) -> list[int]:
        return self.inner.samples_of(step, leaf)

    def share(self, step: int, leaves: Collection[int]) -> float:
        return self.inner.share(step, leaves)

    def close(self) -> None:
        self.inner.close()


def blank(micro: Micro) -> Micro:
    """A micro-batch like this one that teaches nothing."""
    zeros = torch.zeros_like(micro.inputs), torch.zeros_like(micro.targets)
    return replace(micro, inputs=zeros[0], targets=zeros[1], scale=0.0)


def leave_out(run: Run, sieve: Sieve, step: int, redo: bool) -> tuple[frozenset[int], list[dict[str, Any]]]:
    """(leaves that are left out of the step from now on, a record of each whose loss is not a number), alike on all
    ranks. Every rank calls it, or it hangs.

    Nothing is left out unless `redo`, nor where nothing would be left, nor where more than losses follows from all
    leaves of a step: votes of routers, running statistics. Where weights are not numbers, no sample is to blame.
    """
    found = odd_leaves(run, sieve.fetch(step, run.leaves)[: len(run.leaves)])
    told = [
        {"step": step + 1, "leaf": leaf, "samples": sieve.samples_of(step, leaf), "loss": str(loss)}
        for leaf, loss in sorted(found.items())
    ]
    every = bool(run.local.routers) or isinstance(run.update, NormedUpdate)
    left = (
        frozenset(found) if redo and found and not every and sieve.share(step, found) < 1.0 else frozenset()
    )
    if left:
        sieve.leave_out(step, left)
    return left, told


@torch.no_grad()
def odd_leaves(run: Run, leaves: Sequence[Leaf]) -> dict[int, float]:
    """Leaves of the global batch whose loss is not a number, and that loss, going forward once more; none where a
    weight is none. Alike on all ranks: every rank calls it, or it hangs."""
    losses = run.player.play(run.eval_row, leaves, 1.0, run.seed)
    table = torch.zeros(run.of_leaves + 1, dtype=torch.float64, device=run.local.device)
    table[torch.tensor(list(run.leaves), device=table.device)] = losses[: len(run.leaves)].double()
    weights = [at_home(slot.master).detach() for slot in run.local.slots]
    table[-1] = sum(not bool(torch.isfinite(weight).all()) for weight in weights)
    *rows, spoiled = run.mesh.world.all_gather(table).view(-1, len(table)).unbind(1)
    if bool(spoiled.any()):
        return {}
    odd = {leaf: [x for x in row.tolist() if not math.isfinite(x)] for leaf, row in enumerate(rows)}
    return {leaf: values[0] for leaf, values in odd.items() if values}

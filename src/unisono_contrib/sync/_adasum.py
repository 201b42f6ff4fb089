"""The live part of `adasum`: parts of all replicas' gradients, their dot products, and the merged parts again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group, Pending
from unisono.spec.errors import UsageError
from unisono.sync import Sync, Verdict
from unisono.sync._slots import learning
from unisono_contrib.sync._presence import numbered

NOTHING = 1e-13
"""Squared length, over that of what it was added up from, below which a vector is rounding noise around zero."""


class AdasumSync(Sync):
    """Buckets are exchanged while backward goes on; they are merged when all of them are there."""

    sliced = True  # a bucket is dealt, not summed in memory that all see

    def __init__(self, slots: Sequence[Any], group: Group) -> None:
        self.dp, self._world = group, group
        self._device = slots[0].master.device if slots else torch.device("cpu")
        self._slots = list(learning(slots))
        if any(slot.sparse for slot in self._slots):
            what = (
                "sync=adasum merges whole gradients, and those of tables hold the rows alone that were read"
            )
            raise UsageError(what, where="plan.sync, model.kind", fix="sync=every_step", code="P24")
        self._names = {id(p): slot.name for slot in self._slots for p in (slot.live, slot.master)}
        self._rows: Mapping[str, int] = {}
        self._count = 0
        self._flights: list[tuple[Bucket, Tensor, Pending]] = []
        self._counts = torch.ones(1, dtype=torch.float64)

    def among(
        self, world: Group, replica: Group | None = None, counted: frozenset[str] = frozenset()
    ) -> None:
        """Number the tensors of the whole model, alike on all ranks. Raises UsageError P24, on all ranks, where the
        uses of a tied weight are summed after replicas have met."""
        self._world = world
        apart = any(slot.alias for slot in self._slots)
        like = torch.empty(0, dtype=torch.int64, device=self._device)
        if bool(world.all_gather(like.new_tensor([apart])).any()):
            what = "sync=adasum merges whole gradients, and stages of a pipeline hold the two uses of a tied weight"
            fix = "--no-model.tie_embeddings, or pp=1"
            raise UsageError(what, where="plan.sync, plan.pp", fix=fix, code="P24")
        self._rows, self._count = numbered({slot.name for slot in self._slots}, world, like)

    def grad_ready(self, bucket: Bucket) -> None:
        self._flights.append((bucket, *self.dp.start_exchange(bucket.flat)))

    @torch.no_grad()
    def settle(self) -> Verdict:
        flights, self._flights = self._flights, []
        n = self.dp.size
        table = torch.zeros(self._count, n, n, dtype=torch.float64, device=self._device)
        for bucket, parts, pending in flights:
            pending.wait()
            for name, place in self._places(bucket, parts.shape[1]):
                wide = parts[:, place].double()
                table[self._rows[name]] += wide @ wide.T
        # What several ranks of a replica hold alike is in all dot products of a tensor as often: no quotient changes.
        self._counts = merge_weights(self._world.all_reduce(table))
        # Each gradient was weighted for a sum over n replicas; n times that is the mean over its own samples.
        weights = self._counts * n
        gathers = []
        for bucket, parts, _ in flights:
            merged = torch.zeros_like(parts[0])
            for name, place in self._places(bucket, parts.shape[1]):
                merged[place] = weights[self._rows[name]].to(parts.dtype) @ parts[:, place]
            gathers.append((merged, self.dp.start_all_gather(bucket.flat, merged)))
        for _, pending in gathers:
            pending.wait()
        return Verdict.APPLY

    def metrics(self) -> Mapping[str, Any]:
        """`adasum_gain`: how many replicas' gradients the step added up, as a mean over tensors: 1 where all are equal,
        the number of replicas where all are orthogonal."""
        return {"adasum_gain": round(float(self._counts.sum(-1).mean()), 4)}

    def _places(self, bucket: Bucket, width: int) -> Iterator[tuple[str, slice]]:
        """(name, where it lies) of each parameter of which this rank has something. width: elements of a rank's part of
        the bucket."""
        begin, offset = self.dp.index * width, 0
        for p in bucket.params:
            low, high = max(offset, begin), min(offset + p.numel(), begin + width)
            offset += p.numel()
            if high > low:
                yield self._names[id(p)], slice(low - begin, high - begin)


def merge_weights(dots: Tensor) -> Tensor:
    """dots [tensors, n, n], float64: of each tensor the dot products of n replicas' gradients → [tensors, n], how often
    the merged gradient has each of them (Maleki et al., 2021).

    Two equal gradients count half each, two orthogonal ones once each; a vector of zeros changes nothing."""
    n = dots.shape[-1]
    square = dots.diagonal(dim1=1, dim2=2)
    vectors = [row.expand(len(dots), n) for row in torch.eye(n, dtype=dots.dtype, device=dots.device)]
    while len(vectors) > 1:
        pairs = [_merge(dots, square, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = [*pairs, *vectors[2 * len(pairs) :]]
    return vectors[0]


def _merge(dots: Tensor, square: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Weights of the merged vector of two, each a weighted sum of the replicas' gradients."""
    both = _dot(dots, a, b)
    kept_a, kept_b = (1.0 - _share(both, _dot(dots, x, x), (x * x * square).sum(1)) for x in (a, b))
    return kept_a[:, None] * a + kept_b[:, None] * b


def _dot(dots: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ti,tij,tj->t", a, dots, b)


def _share(both: Tensor, length: Tensor, size: Tensor) -> Tensor:
    """both / (2 · length), zero where `length`, of a vector added up from pieces of squared size `size`, is nothing."""
    is_some = length > NOTHING * size
    return torch.where(is_some, both / (2.0 * torch.where(is_some, length, 1.0)), 0.0)

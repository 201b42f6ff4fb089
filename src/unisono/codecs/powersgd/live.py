"""Thin factors of a bucket's matrices on their way: two sums, one after the other, of all matrices at once."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._sparse import spans
from unisono.codecs.powersgd import PowerSGD


class PowerCoder(Coder):
    """The projection of the sum of all replicas' matrices. It keeps q [rank, columns] of each, rows of norm 1."""

    counts = True

    def __init__(self, member: PowerSGD) -> None:
        self.member = member

    def alike(self, name: str, like: Tensor) -> Mapping[str, Tensor]:
        rank = self.member.rank(like.shape)
        if not rank:
            return {}
        lot = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        q = torch.randn(rank, like.shape[1:].numel(), generator=lot, dtype=torch.float64)
        return {"q": unit(q, q).to(like.device, like.grad_dtype or like.dtype)}

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        if memory.step < self.member.start:
            yield Sent(lambda: grad)
            return (yield Sum(grad))
        guesses = [kept.get("q") for kept in memory.alike]
        numels = [shape.numel() for shape in shapes]
        parts = [x for _, x in spans(grad, numels)]
        # Of a matrix with a guess its first factor, all else as it is: one sum.
        matrices = [
            x if q is None else torch.mm(x.view(-1, q.shape[1]), q.t())
            for x, q in zip(parts, guesses, strict=True)
        ]
        total = yield Sum(torch.cat([x.view(-1) for x in matrices]))
        sums = _apart(total, matrices)
        lefts = [p if q is None else orthonormal(p) for p, q in zip(sums, guesses, strict=True)]
        # The transposed factor times the matrix reads it row by row, 30 times as fast as the other way round.
        rights = [
            None if q is None else torch.mm(p.t().contiguous(), x.view(len(p), -1))
            for x, p, q in zip(parts, lefts, guesses, strict=True)
        ]
        sides = [x if right is None else left for x, left, right in zip(parts, lefts, rights, strict=True)]
        yield Sent(lambda: _written(grad.new_empty(sum(numels)), sides, rights))
        factors = [right for right in rights if right is not None]
        if factors:
            total = yield Sum(torch.cat([right.view(-1) for right in factors]))
            added = iter(_apart(total, factors))
            rights = [None if right is None else next(added) for right in rights]
        for q, right in zip(guesses, rights, strict=True):
            if q is not None and right is not None:
                q.copy_(unit(right, q))
        return _written(grad, lefts, rights)


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """flat [n] as tensors of the shapes of these, one after the other."""
    parts = flat.split([x.numel() for x in like])
    return [part.view_as(x) for part, x in zip(parts, like, strict=True)]


def _written(out: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor | None]) -> Tensor:
    """out, overwritten parameter by parameter with left · right, or with left where there is no right."""
    sizes = [
        left.numel() if right is None else len(left) * right.shape[1]
        for left, right in zip(lefts, rights, strict=True)
    ]
    for (_, x), left, right in zip(spans(out, sizes), lefts, rights, strict=True):
        if right is None:
            x.copy_(left)
        else:
            torch.mm(left, right, out=x.view(len(left), -1))
    return out


def orthonormal(p: Tensor) -> Tensor:
    """Columns that span those of p [rows, rank], in the dtype of p. Where they span less than `rank` dims, as those of
    zeros do, others fill up, so that a later gradient finds all directions open. By reflections (Householder, 1958), in
    float64."""
    return torch.linalg.qr(p.double()).Q.to(p.dtype)


def unit(right: Tensor, before: Tensor) -> Tensor:
    """right [rank, columns] with rows of norm 1, so that products with small gradients do not vanish. A row of zeros,
    or of what is not finite, says nothing about the next gradient: that of `before` stays."""
    wide = right.double()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return torch.where(norms.isfinite() & (norms > 0), wide / norms, before).to(right.dtype)

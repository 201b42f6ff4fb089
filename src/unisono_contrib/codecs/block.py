"""Stretches in turn, or whole rows that replicas agree on: a part of each parameter, added up without places.

Structured updates are those of Konečný et al., "Federated learning: strategies for improving communication efficiency",
2016; that replicas agree on what they send, so that it can be added up, is from Chen et al., "ScaleCom", 2020.
"""

from collections.abc import Sequence
from math import ceil, prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._parcel import Sparse, kept_of
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor


class Stretches(Sparse):
    """A stretch of each parameter in turn, or the rows that weigh most in all replicas together.

    - `kind=cyclic` cuts each parameter into F = 1/ratio stretches; step s sends stretch s mod F.
    - `kind=rows` first adds up the squared norms of each matrix's rows, then the rows that have the largest of these
      sums. A vector is one row.

    Sums need no places, so bytes do not grow with the number of replicas. What is not sent is lost, unless error
    feedback keeps it (`+ef`).
    """

    name = "block"
    main = "ratio"
    linear = True

    ratio: float = Field(default=0.1, gt=0, le=1, description="share of the elements, or rows, that are sent")
    kind: Literal["cyclic", "rows"] = Field("cyclic", description="stretches in turn, or rows by their norms")

    @property
    def turns(self) -> int:
        """Steps in which everything is sent once."""
        return ceil(1 / self.ratio - 1e-9)

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows of a parameter, how many of them are sent); a vector is one row."""
        rows = shape[0] if len(shape) > 1 and prod(shape) else 1
        return rows, kept_of(rows, self.share(shape))

    def part(self, shape: Sequence[int], step: int) -> tuple[int, int]:
        """(begin, end) of the stretch of a parameter that a step sends."""
        numel, turn = prod(shape), step % self.turns
        if self.share(shape) == 1.0:
            return 0, numel
        return -(-turn * numel // self.turns), -(-(turn + 1) * numel // self.turns)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numel = sum(map(prod, shapes))
        if self.kind == "cyclic":
            shares = (1 if self.share(shape) == 1.0 else 1 / self.turns for shape in shapes)
            sums = [1 + sum(share * prod(shape) for share, shape in zip(shares, shapes, strict=True))]
        else:
            rows = [self.rows(shape) for shape in shapes]
            kept = (n * prod(shape) // m for shape, (m, n) in zip(shapes, rows, strict=True))
            sums = [sum(m for m, _ in rows), sum(kept)]
        calls = (Call("dp", "all_reduce", 2 * int(n * itemsize) * (dp - 1) // dp) for n in sums)
        return Work(tuple(calls), moved=2 * numel * itemsize)  # read once before the sum, zeros after it

    def bind(self) -> "StretchCoder | RowCoder":
        return StretchCoder(self) if self.kind == "cyclic" else RowCoder(self)


class StretchCoder(Coder):
    """The sum of one stretch of each parameter."""

    counts = True

    def __init__(self, member: Stretches) -> None:
        self.member = member

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        from unisono.codecs._sparse import finite_mark, spans

        parts = []
        for shape, (begin, _) in zip(shapes, spans(grad, [shape.numel() for shape in shapes]), strict=True):
            first, last = self.member.part(shape, memory.step)
            parts.append(slice(begin + first, begin + last))
        sent = torch.cat([*(grad[part] for part in parts), finite_mark(grad)])
        yield Sent(lambda: _filled(torch.zeros_like(grad), parts, sent))
        total = yield Sum(sent)
        return _filled(grad.zero_(), parts, total).add_(total[-1])


def _filled(out: "Tensor", parts: Sequence[slice], values: "Tensor") -> "Tensor":
    """out with the values, one after the other, in these parts."""
    at = 0
    for part in parts:
        out[part] = values[at : at + part.stop - part.start]
        at += part.stop - part.start
    return out


class RowCoder(Coder):
    """The sum of the rows that replicas agree on."""

    def __init__(self, member: Stretches) -> None:
        self.member = member

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        rows = [self.member.rows(shape) for shape in shapes]
        tables = _tables(grad, shapes, rows)
        scores = [torch.linalg.vector_norm(table, dim=1).square_() for table in tables]
        agreed = (yield Sum(torch.cat(scores))).split([m for m, _ in rows])
        chosen = [score.topk(n).indices for score, (_, n) in zip(agreed, rows, strict=True)]
        sent = [table[places] for table, places in zip(tables, chosen, strict=True)]

        def placed(flat: "Tensor", parts: "Sequence[Tensor]") -> "Tensor":
            """flat, of zeros, with the chosen rows."""
            for table, places, part in zip(_tables(flat, shapes, rows), chosen, parts, strict=True):
                table.index_copy_(0, places, part.view(len(places), -1))
            return flat

        yield Sent(lambda: placed(torch.zeros_like(grad), sent))
        total = yield Sum(torch.cat([part.view(-1) for part in sent]))
        return placed(grad.zero_(), total.split([part.numel() for part in sent]))


def _tables(flat: "Tensor", shapes: "Sequence[Size]", rows: Sequence[tuple[int, int]]) -> "list[Tensor]":
    """Each parameter in flat [n] as [rows, columns]."""
    from unisono.codecs._sparse import spans

    parts = (x for _, x in spans(flat, [shape.numel() for shape in shapes]))
    return [x.view(m, x.numel() // m) for x, (m, _) in zip(parts, rows, strict=True)]

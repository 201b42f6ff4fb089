"""Collectives on the ranks that are there. Imports torch: rank side only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import COLLECTIVES, Algorithm, Pending
from unisono.launch.context import RankContext
from unisono.spec.errors import UsageError
from unisono.train.build.build import Place
from unisono_contrib.measure.benches import Row, compared, spread, within
from unisono_contrib.measure.benches.collectives import PEER, least_bytes
from unisono_contrib.measure.turns import agreed, in_turns

Call = Callable[[], object]
ELSEWHERE = ", from elsewhere"
"""Behind the name of an algorithm: its operation on any tensors, where it has memory of its own for them."""
_HOUSED = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class _Vectors:
    """whole, out [n]; part, piece [n / ranks]: what goes in and what comes out."""

    whole: Tensor
    out: Tensor
    part: Tensor
    piece: Tensor

    @classmethod
    def of(cls, nbytes: int, size: int, device: torch.device) -> "_Vectors":
        count = max(1, nbytes // 4 // size) * size
        lengths = (count, count, count // size, count // size)
        return cls(*(torch.empty(length, device=device).zero_() for length in lengths))


def rows(ctx: RankContext, place: Place, question: Mapping[str, Any]) -> list[Row]:
    """One for each operation, size and algorithm; of an algorithm that cannot be had here, one that says why."""
    bound: dict[str, Algorithm] = {}
    rows_of_all: list[Row] = []
    world: Any = dist.group.WORLD
    for text in question["members"]:
        try:
            bound[text] = COLLECTIVES.read(text).bind(world, "dp")
        except UsageError as error:
            rows_of_all.append({"algorithm": text, "skipped": error.what, "ratio_vs_gloo": None})
    for op in question["ops"]:
        for nbytes in question["sizes"]:
            rows_of_all += _row(op, _Vectors.of(nbytes, ctx.world, place.device), bound, ctx, place, question)
    return rows_of_all


def _row(
    op: str, vectors: _Vectors, bound: Mapping[str, Algorithm], ctx: RankContext, place: Place,
    question: Mapping[str, Any],
) -> list[Row]:  # fmt: skip
    ways: dict[str, Call] = {PEER: _theirs(op, vectors, ctx.rank, ctx.world)}
    sent: dict[str, int | None] = {PEER: None}
    for text, algorithm in bound.items():
        housed = op in _HOUSED and algorithm.near(place.device)
        calls = {text + ELSEWHERE * housed: _ours(op, vectors, algorithm, ctx.rank)}
        if housed:
            calls[text] = _housed(op, vectors, algorithm, ctx.rank)
        for name, (call, mine) in sorted(calls.items()):
            ways[name], sent[name] = call, round(agreed([float(mine)])[0])
    times = in_turns(ways, place.device, question["seconds"], question["rounds"])
    nbytes = vectors.whole.nbytes
    return [
        {
            "op": op, "bytes": nbytes, "algorithm": text, "ranks": ctx.world, "hosts": len(set(question["hosts"])),
            **spread(times[text]), "turns": len(times[text]),
            "bytes_s": nbytes / spread(times[text])["seconds"],
            "sent_bytes": sent[text], "least_bytes": least_bytes(op, nbytes, ctx.world),
            "ratio_vs_gloo": compared(times, text, PEER), "ratio_low": low, "ratio_high": high, "skipped": None,
        }
        for text in ways
        for low, high in [within(times, text, PEER) or (0.0, 0.0)]
    ]  # fmt: skip


def _theirs(op: str, v: _Vectors, rank: int, size: int) -> Call:
    """As a loop with torch alone would call it."""
    match op:
        case "all_reduce":
            return lambda: dist.all_reduce(v.whole)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(v.piece, v.whole)
        case "all_gather":
            return lambda: dist.all_gather_single(v.out, v.part)
        case "all_to_all":
            return lambda: dist.all_to_all_single(v.out, v.whole)
        case "broadcast":
            return lambda: dist.broadcast(v.whole, 0)
        case "reduce":
            return lambda: dist.reduce(v.whole, 0)
        case "scatter":
            return lambda: dist.scatter(v.piece, list(v.whole.chunk(size)) if rank == 0 else None, 0)
    return lambda: dist.gather(v.part, list(v.out.chunk(size)) if rank == 0 else None, 0)


def _housed(op: str, v: _Vectors, algorithm: Algorithm, rank: int) -> tuple[Call, int]:
    """As `_ours`, on memory of the algorithm's own: a buffer of gradients, or what is lent for one operation. Of a
    gather, with the copy of this rank's part into it."""
    if op == "all_reduce":
        buffer = algorithm.buffer(v.whole.numel(), v.whole)
        by = algorithm.pick(op, buffer, True)
        return lambda: by.all_reduce(buffer, dist.ReduceOp.SUM).wait(), by.sends(op, buffer)

    def scatter() -> None:
        algorithm.reduce_scatter(v.piece, algorithm.lend(op, v.whole.numel(), v.whole))

    def gather() -> None:
        out, each = algorithm.lend(op, v.out.numel(), v.out), v.part.numel()
        part = out[each * rank : each * (rank + 1)].copy_(v.part)
        algorithm.pick(op, part).all_gather(out, part).wait()

    if op == "reduce_scatter":
        return scatter, algorithm.sends(op, v.whole)
    return gather, algorithm.sends(op, v.part)


def _ours(op: str, v: _Vectors, algorithm: Algorithm, rank: int) -> tuple[Call, int]:
    """(what training calls, bytes that this rank sends in it)."""
    x, first = v.part if op in ("all_gather", "gather") else v.whole, rank == 0
    later = op == "all_reduce" and not algorithm.near(v.whole.device)
    if later:
        x = algorithm.buffer(v.whole.numel(), v.whole)
    by = algorithm.pick(op, x, later)
    calls: dict[str, Callable[[], Pending | None]] = {
        "all_reduce": lambda: by.all_reduce(x, dist.ReduceOp.SUM),
        "reduce_scatter": lambda: by.reduce_scatter(v.piece, x),
        "all_gather": lambda: by.all_gather(v.out, x),
        "all_to_all": lambda: by.exchange(v.out, x),
        "broadcast": lambda: by.broadcast(x, 0),
        "reduce": lambda: by.reduce(x, 0, dist.ReduceOp.SUM),
        "scatter": lambda: by.scatter(v.piece, x if first else None, 0),
        "gather": lambda: by.gather(v.out if first else None, x, 0),
    }
    begin = calls[op]

    def call() -> None:
        pending = begin()
        if pending is not None:
            pending.wait()

    return call, by.sends(op, x)

"""Collectives on the ranks that are there. Imports torch: rank side only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.group import Group
from unisono.launch.context import RankContext
from unisono.measure.benches import Row, compared, spread
from unisono.measure.benches.collectives import PEER, least_bytes
from unisono.measure.turns import agreed, in_turns
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError
from unisono.train.build import Place

Call = Callable[[], object]


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


def rows(ctx: RankContext, place: Place, asked: Mapping[str, Any]) -> list[Row]:
    """One for each operation, size and algorithm; of an algorithm that cannot be had here, one that says why."""
    groups: dict[str, Group] = {}
    found: list[Row] = []
    world = dist.group.WORLD
    for text in asked["members"]:
        try:
            groups[text] = Group(
                "dp", range(ctx.world), ctx.rank, world, Recorder(ctx.rank), collective=COLLECTIVES.read(text)
            )
        except UsageError as error:
            found.append({"algorithm": text, "skipped": error.what, "ratio_vs_gloo": None})
    for op in asked["ops"]:
        for nbytes in asked["sizes"]:
            found += _row(op, _Vectors.of(nbytes, ctx.world, place.device), groups, ctx, place, asked)
    return found


def _row(
    op: str, vectors: _Vectors, groups: Mapping[str, Group], ctx: RankContext, place: Place,
    asked: Mapping[str, Any],
) -> list[Row]:  # fmt: skip
    ways: dict[str, Call] = {PEER: _theirs(op, vectors, ctx.rank, ctx.world)}
    for text, group in groups.items():
        call = _ours(op, vectors, group)
        if call is not None:
            ways[text] = call
    sent = {PEER: None} | {text: _sent(groups[text], call) for text, call in ways.items() if text in groups}
    times = in_turns(ways, place.device, asked["seconds"])
    nbytes = vectors.whole.nbytes
    return [
        {
            "op": op, "bytes": nbytes, "algorithm": text, "ranks": ctx.world, "hosts": len(set(asked["hosts"])),
            **spread(times[text]), "turns": len(times[text]),
            "bytes_s": nbytes / spread(times[text])["seconds"],
            "sent_bytes": sent[text], "least_bytes": least_bytes(op, nbytes, ctx.world),
            "ratio_vs_gloo": compared(times, text, PEER), "skipped": None,
        }
        for text in ways
    ]  # fmt: skip


def _sent(group: Group, call: Call) -> int:
    """Bytes that the busiest rank sends in one call, as it counts them."""
    before = sum(group.recorder.bytes().values())
    call()
    return round(agreed([float(sum(group.recorder.bytes().values()) - before)])[0])


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


def _ours(op: str, v: _Vectors, group: Group) -> Call | None:
    """As training calls it; None where groups of this version do not have the operation."""
    match op:
        case "all_reduce":
            buffer = group.buffer(v.whole.numel(), v.whole)
            return lambda: group.start_all_reduce(buffer).wait()
        case "reduce_scatter":
            return lambda: group.reduce_scatter(v.whole)
        case "all_gather":
            return lambda: group.gather_into(v.out, v.part)
        case "all_to_all":
            return lambda: group.start_exchange(v.whole)[1].wait()
        case "broadcast":
            return lambda: group.broadcast(v.whole)
    method: Any = getattr(group, op, None)
    if method is None:
        return None
    match op:
        case "reduce":
            return lambda: method(v.whole)
        case "scatter":
            return lambda: method(v.piece, v.whole if group.index == 0 else None)
    return lambda: method(v.part)

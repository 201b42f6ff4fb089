"""How each block of a model is played: what the keys of a plan and its ranges of blocks come to. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.plan.away import Away, again_of, away_in, away_of, stages_said
from unisono.plan.keys import PlanKeys
from unisono.plan.ranges import ranges_of
from unisono.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Of one block. recompute: none, selective or full. away: what of it lies elsewhere. zero: what `shard` deals.
    whole: each rank of `tp` has all of its weights, and computes with the positions that lie on it."""

    recompute: str
    away: Away
    zero: int
    whole: bool = False


@lru_cache(maxsize=1024)
def options_of(plan: PlanKeys, stages: Sequence[range]) -> tuple[BlockOptions, ...]:
    """Of every block of the model, whose stages have these. Ranges have the last word; `recompute=auto` says it of the
    first blocks of each stage. Raises UsageError P25 for a range of blocks that there are not."""
    found: list[BlockOptions] = []
    away, count = away_of(plan), sum(map(len, stages))
    for told in stages_said(plan) - {len(stages)}:
        what = f"recompute={plan.recompute} says {told} stages, and the model is cut into {len(stages)}"
        raise UsageError(
            what, where="plan.recompute", fix="recompute=auto, or a number for each stage", code="P25"
        )
    for at, stage in enumerate(stages):
        again = again_of(plan, len(stage), at)
        modes = ["full"] * again.full + ["selective"] * again.selective
        modes += ["none"] * (len(stage) - len(modes))
        found += [BlockOptions(mode, away, plan.zero) for mode in modes]
    for one in ranges_of(plan.blocks):
        if one.last >= count:
            what = f"blocks={plan.blocks} names block {one.last}, and the model has {count}, from 0 on"
            raise UsageError(what, where="plan.blocks", fix=f"numbers up to {count - 1}", code="P25")
        for number in range(one.first, one.last + 1):
            usual, offload = found[number], one.says("offload")
            found[number] = BlockOptions(
                one.says("recompute") or usual.recompute,
                usual.away if offload is None else away_in(offload),
                int(one.says("zero") or usual.zero),
                one.says("tp") is not None and plan.tp > 1,
            )
    return tuple(found)


def on_disk(plan: PlanKeys, each: Sequence[BlockOptions]) -> bool:
    """Whether anything lies in a file."""
    return any(away.on_disk for away in (away_of(plan), *(block.away for block in each)))

"""Plans that play some blocks faster than others: of a plan that fits, while a faster one does not, as many blocks as
fit are played the faster way. Later blocks of a row come first, since backward releases them first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

from unisono.plan.blocks import Range, text_of
from unisono.planner.cuts import rows_of
from unisono.planner.grouping import is_uniform, numbers_of
from unisono.planner.memory import MARGIN, rows_seen
from unisono.planner.model_kinds import attending
from unisono.planner.pricing import closed, verdict
from unisono.planner.pricing import modes as quick_modes
from unisono.planner.request import PlanRequest
from unisono.planner.work.transformer import Transformer

# By key, of the value that a plan has, what is quicker and needs more memory, the quickest first.
_QUICKER = {
    "recompute": {"full": ("none", "selective"), "selective": ("none",)},
    "zero": {3: (1, 2), 2: (1,)},
}
_UNSURE = 1.5  # times what is promised, below which blocks are not counted; no price depends on it


def between(ask: PlanRequest, held: frozenset[str], saved: float = 0.0) -> Iterator[PlanRequest]:
    """Yield variants of a plan that fits: with as many blocks as fit played in each faster way, where these are some
    and not all.

    held: keys that stay as they are. saved: seconds of a step that a variant has to save, as far as is known before
    blocks are counted.
    """
    plan, model = ask.plan, attending(ask.model)
    if "blocks" in held or not is_uniform(plan) or model is None:
        return
    keys = [key for key in _QUICKER if key not in held and (key != "zero" or plan.shard > 1)]
    for key in keys:
        modes = quick_modes(ask) if key == "recompute" else ()
        for value in _QUICKER[key].get(getattr(plan, key), ()):
            if key == "recompute" and value not in modes:
                continue
            if _promised(ask, key, value) < saved:
                continue
            mixed = _most(ask, model, key, str(value))
            if mixed:
                yield mixed


def _promised(ask: PlanRequest, key: str, value: str | int) -> float:
    """Return the seconds that the faster way saves at most: its saving on all blocks, times the share of blocks for
    which the fullest rank has room, and half as much again, since other rows may have more room."""
    every = replace(ask, plan=replace(ask.plan, **{key: value}))
    usual, more = verdict(ask), verdict(every).memory.total
    room, need = usual.capacity / (1.0 + MARGIN) - usual.memory.total, more - usual.memory.total
    part = 1.0 if need <= 0 else max(0.0, min(1.0, _UNSURE * room / need))
    return part * (closed(ask).step - closed(every).step)


def _most(ask: PlanRequest, model: Transformer, key: str, value: str) -> PlanRequest | None:
    plan = ask.plan
    rows = numbers_of(model, plan, rows_of(model, plan.schedule, plan.pp, ask.stack.balanced))

    def with_quicker(many: Iterable[int]) -> PlanRequest:
        """Return the request with the last `many` blocks of each row played faster."""
        numbers = sorted({n for blocks, k in zip(rows, many, strict=True) for n in blocks[len(blocks) - k :]})
        return replace(ask, plan=replace(plan, blocks=text_of(_ranges(numbers, key, value))))

    @cache
    def most(row: int) -> int:
        """Return how many blocks of a row fit. A row's memory depends on its own blocks alone."""
        return _largest(
            len(rows[row]),
            lambda k: verdict(with_quicker(k if r == row else 0 for r in range(len(rows)))).is_safe,
        )

    seen = rows_seen(plan.pp)
    # A row that is not looked at holds no more than the one before it that is.
    many = [min(len(blocks), most(max(s for s in seen if s <= row))) for row, blocks in enumerate(rows)]
    if not any(many) or all(k == len(blocks) for k, blocks in zip(many, rows, strict=True)):
        return None
    request = with_quicker(many)
    return request if verdict(request).is_safe else None


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where 0 does and larger ones fit ever less."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _ranges(numbers: Iterable[int], key: str, value: str) -> tuple[Range, ...]:
    """Join consecutive numbers into ranges."""
    ranges: list[Range] = []
    for n in numbers:
        if ranges and ranges[-1].last == n - 1:
            ranges[-1] = replace(ranges[-1], last=n)
        else:
            ranges.append(Range(n, n, ((key, value),)))
    return tuple(ranges)

"""`recompute=auto`: as few blocks as fit are computed again. The one rule, by which prices and runs choose alike."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.plan import Plan


def fewest(
    plan: Plan,
    rows: Sequence[Sequence[int]],
    blocks: Sequence[int],
    fullest: Callable[[Plan], int | None],
    *,
    selective: bool,
) -> Plan | None:
    """The plan with as few blocks computed again as fit: of each row of the pipeline first attention in more and more
    of them, where that saves memory, then whole ones in the place of these; earlier blocks first, whose activations are
    held longest. None where nothing fits.

    rows: the stages of each row, in the order of forward passes. blocks: of each stage. fullest: the row that lacks
    most memory under a plan, None where all fit.

    Example: of four rows of 8 blocks under 1f1b, `recompute=auto:full=4/2/0/0,selective=0`.
    """
    full, attention = [0] * len(blocks), [0] * len(blocks)

    def more(row: int) -> bool:
        """One step more of a row; False where all of it is computed again."""
        for stage in rows[row] if selective else ():
            if attention[stage] + full[stage] < blocks[stage]:
                attention[stage] += 1
                return True
        for stage in rows[row]:
            if full[stage] < blocks[stage]:
                full[stage] += 1
                attention[stage] -= attention[stage] > 0
                return True
        return False

    while True:
        tried = replace(plan, recompute=_text(full, attention, blocks))
        lacking = fullest(tried)
        if lacking is None:
            return tried
        if not more(lacking):
            return None


def _text(full: Sequence[int], selective: Sequence[int], blocks: Sequence[int]) -> str:
    """The value of `recompute` that says so many blocks of each stage."""
    for mode, counts in (("full", full), ("selective", selective)):
        if list(counts) == list(blocks):
            return mode
    if not any((*full, *selective)):
        return "none"
    return f"auto:full={_counts(full)},selective={_counts(selective)}"


def _counts(numbers: Sequence[int]) -> str:
    """Numbers by stage; of equal ones one."""
    return "/".join(map(str, numbers if len({*numbers}) > 1 else numbers[:1]))

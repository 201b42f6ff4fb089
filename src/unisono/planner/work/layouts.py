"""Layouts of layers on `tp` beside one row of ranks: products in rows and columns (`tp=RxC`), and virtual shards.

Their programs lie in the sister package, and so does what they compute, send and keep. A layout's module has `block`,
`again`, `stem` and `head`, as `work.blocks` has them.
"""

from types import ModuleType

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.machines.order import virtual_of
from unisono.spec.finder import contributed


def layout_of(plan: Plan) -> ModuleType | None:
    """Return the module that counts a plan's passes; None where layers lie in one row."""
    if virtual_of(plan) > 1:
        return contributed("unisono.planner.work.virtual")
    return contributed("unisono.planner.work.grids") if isinstance(plan.tp, Grid) else None


def virtual_kept() -> ModuleType:
    """Return the module that counts what virtual shards keep."""
    return contributed("unisono.planner.work.virtual_kept")


def grid_kept() -> ModuleType:
    """Return the module that counts what ranks of `tp=RxC` keep."""
    return contributed("unisono.planner.work.grid_kept")

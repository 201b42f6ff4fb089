"""Bytes of what training keeps of each weight: itself, its gradient, the optimiser's numbers (Rajbhandari et al.)."""

from collections.abc import Sequence
from typing import Protocol

from unisono.plan import Plan
from unisono.planner.machines.chip import Traffic
from unisono.planner.machines.cluster import Cluster
from unisono.planner.stack import Stack
from unisono.planner.work.stage import ITEM


class WholeMatrixSteps(Protocol):
    """How an optimiser steps a model some of whose matrices have owners. The sister package says it."""

    def moments(self, plan: Plan, elements: float, layers: float, first: int = 0, /) -> float:
        """Numbers that are kept of each of so many weights of a row, in the mean of its fullest rank."""
        ...

    def price(
        self, plan: Plan, cluster: Cluster, stack: Stack, rows: Sequence[float], /
    ) -> tuple[Traffic, float]:
        """What owners send in an update, and the seconds in which they compute. rows: blocks of each."""
        ...


class ModelStates(Protocol):
    """What a model says of its optimiser. states: numbers kept of each weight. averages: of these weights over updates,
    beside it. steps: where that is not all."""

    @property
    def states(self) -> int: ...

    @property
    def averages(self) -> int: ...

    @property
    def steps(self) -> WholeMatrixSteps | None: ...


def moments_of(model: ModelStates, plan: Plan, elements: float, layers: float, first: int = 0) -> float:
    """Numbers that the optimiser keeps of each of `elements` weights of a row, in the mean of its fullest rank, and
    averages of the weights. layers: blocks of the row, from block `first` on."""
    moments = model.states if model.steps is None else model.steps.moments(plan, elements, layers, first)
    return moments + model.averages


def states(
    parameters: float,
    *,
    shard: int,
    zero: int,
    precision: str,
    grad_bytes: int,
    moments: float = 2,
    masters: bool = True,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser for `parameters` elements, shared out over `shard` ranks by `zero`.

    Adam keeps two moments in fp32; below fp32 also a master copy of the weights: 2 + 2 + 12 bytes an element
    (Rajbhandari et al., 2019, section 3.1), or 2 + 4 + 12 where gradients add up in fp32. moments: 1 of a velocity.
    masters: whether there are any below fp32; without them 2 + 4 + 8 (`bf16:stochastic`).
    """
    item = ITEM[precision]
    wide = max(item, 4)
    weights, grads = item * parameters, (grad_bytes if item < 4 else item) * parameters
    optim = (moments * wide + (4 if item < 4 and masters else 0)) * parameters
    return (
        weights / (shard if zero >= 3 else 1),
        grads / (shard if zero >= 2 else 1),
        optim / shard,
    )


def stored(plan: Plan, stack: Stack) -> str:
    """Dtype of weights: our own stay fp32, and autocast makes copies, which count as activations; or they have masters,
    which count as the optimiser's, or none."""
    wide = stack.autograd and ITEM[plan.precision] < 4 and not plan.arithmetic.narrow
    return "fp32" if wide else plan.precision


def states_of_ours(parameters: float, plan: Plan, shard: int, moments: float) -> tuple[float, float, float]:
    """`states` as our own runs keep them: in fp32, or in bf16 without masters."""
    alone = plan.arithmetic.stochastic
    precision, how = "bf16" if alone else "fp32", {"shard": shard, "zero": plan.zero, "moments": moments}
    return states(parameters, precision=precision, grad_bytes=4, masters=not alone, **how)


def item_of(plan: Plan, stack: Stack) -> int:
    """Bytes of a weight as it is kept and gathered, and of an activation as it goes from stage to stage: our own runs
    keep the weights' dtype there, others compute and send in one."""
    return ITEM[stored(plan, stack)]

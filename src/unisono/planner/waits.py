"""What a step waits for beside its own work: ranks that are slow today, and data that is not there yet."""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from unisono.planner.loading import Loading, loading, shown
from unisono.planner.parts import Price
from unisono.planner.stragglers import Law, PolicyPace, pace

if TYPE_CHECKING:
    from unisono.planner.simulate import Question


def computing(got: Price) -> float:
    """Seconds of a step, without what it waits for, in which ranks do not talk with other replicas: what is random
    about it."""
    return got.bare.step - (got.comm["dp"].exposed if "dp" in got.comm else 0.0)


def with_waits(got: Price, ask: "Question") -> Price:
    """The price with stragglers, where any are asked for, and with what data is waited for beyond all else.

    Raises UsageError for a policy that cannot be.
    """
    plan, late = ask.plan, 0.0
    if ask.stragglers is not None:
        late = computing(got) * (paced(ask.stragglers, plan.sync, plan.dp, plan.inner).step - 1.0)
    data = shown(fed(ask), got.step + late)
    if not late and not data:
        return got
    return replace(got, step=got.step + late + data, straggling=late, loading=data)


def fed(ask: "Question") -> Loading:
    """What the question's plan asks of its hosts."""
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return loading(ask.model, ask.plan, ask.cluster, ask.stack, **sizes)


@lru_cache(maxsize=256)
def paced(of: Law, sync: str, replicas: int, inner: int) -> PolicyPace:
    """`stragglers.pace`, which may play thousands of steps: a study of what would help asks for the same again."""
    return pace(of, sync, replicas, inner)

"""The error of a plan that does not fit, with the cheapest change that would."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from unisono.plan import Plan
from unisono.planner.pricing import Model
from unisono.planner.remedies import put_away, remedies
from unisono.planner.simulate import GIB, PlanRequest, PlanResult, gib, simulate
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.words import nbytes, seconds


class DoesNotFit(Infeasible):
    """The plan needs more memory than a device has; `short` bytes more."""

    def __init__(self, what: str, answer: PlanResult, **details: Any) -> None:
        super().__init__(what, **details)
        self.answer = answer

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {
            "short_gib": self.answer.verdict.short / GIB,
            "capacity_gib": self.answer.verdict.capacity / GIB,
            "mem_gib": gib(self.answer.verdict.memory),
            "step_s": self.answer.price.step,
            "error_pct": self.answer.error_pct,
        }


def demand(
    answer: PlanResult, cut: str = "", priced: Callable[[PlanRequest], PlanResult | None] | None = None
) -> None:
    """Raises DoesNotFit, with the cheapest remedy, where memory is short. cut: another cut into stages that fits.
    priced: the answer of a changed plan, None where it cannot be."""
    if answer.verdict.fits:
        return
    ask, memory = answer.request, answer.verdict.memory
    device, remedy = ask.cluster.of_row(answer.verdict.row).device.name, _remedy(ask, priced or simulate)
    parts = sorted(gib(memory).items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {nbytes(size * GIB)}" for name, size in parts if name != "total" and size)
    raise DoesNotFit(
        f"the plan needs {nbytes(memory.total)}, {device} has {nbytes(answer.verdict.capacity)}:"
        f" short by {nbytes(answer.verdict.short)}; with that a step would take {seconds(answer.price.step)}",
        answer,
        where=f"{ask.plan} on {ask.cluster.name}, pipeline row {answer.verdict.row}",
        likely=largest,
        fix=f"{remedy}; or {cut}" if cut else remedy,
    )


def _remedy(ask: PlanRequest, priced: Callable[[PlanRequest], PlanResult | None]) -> str:
    """The change that fits and makes the step longest least; where none fits, the one that needs least."""
    tried: list[tuple[str, PlanResult]] = []
    sizes = ask.micro_batch, ask.micros
    for said, plan, micro_batch, micros in (
        *remedies(ask.plan, *sizes, ask.model.n_layer), *put_away(ask.plan, *sizes)
    ):  # fmt: skip
        other = replace(ask, plan=plan, micro_batch=micro_batch, micros=micros)
        with suppress(UsageError):  # nobody has said how fast copies to a host are
            if _sensible(ask.model, plan) and other.served and (answer := priced(other)) is not None:
                tried.append((said, answer))
    fitting = [(said, answer) for said, answer in tried if answer.verdict.fits]
    if fitting:
        said, best = min(fitting, key=lambda pair: pair[1].price.step)
        return f"{said}: {nbytes(best.verdict.memory.total)}, {seconds(best.price.step)} a step"
    if not tried:
        return "more devices, and with them a greater shard, tp or pp"
    said, least = min(tried, key=lambda pair: pair[1].verdict.short)
    return (
        f"more devices, and with them a greater shard, tp or pp; {said} alone is still"
        f" {nbytes(least.verdict.short)} short"
    )


def _sensible(model: Model, plan: Plan) -> bool:
    return model.n_head % plan.tp == 0 and model.kv_heads % plan.tp == 0 and plan.pp <= model.n_layer

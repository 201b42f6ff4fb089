"""One plan on one cluster: seconds, memory and traffic; and what would make it fit."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from unisono.plan import Plan
from unisono.planner import pricing
from unisono.planner.error_bars import Trust, trust
from unisono.planner.memory import Memory, MemoryVerdict
from unisono.planner.price_parts import Price
from unisono.planner.pricing import Model, price, verdict
from unisono.planner.remedies import put_away, remedies
from unisono.planner.request import PlanRequest
from unisono.planner.stalls import with_waits
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.words import nbytes, seconds

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The price of a request and whether it fits. bubble: share of the pipeline's time in which its busiest row waits
    (Qi et al., 2023), for example (p-1)/(m+p-1) of 1f1b."""

    request: PlanRequest
    price: Price
    verdict: MemoryVerdict
    bubble: float

    @property
    def tflops(self) -> float:
        """10^12 FLOP/s of one device, recomputation not counted."""
        ask = self.request
        return ask.model.step_flops(ask.batch) / ask.plan.world / self.price.step / 1e12

    @property
    def mfu(self) -> float:
        """Share of the device's peak in the plan's precision (Chowdhery et al., 2022)."""
        return self.tflops * 1e12 / self.request.cluster.device.flops(self.request.plan.precision)

    @property
    def stages(self) -> tuple[float, ...]:
        """Blocks of each row of the pipeline; of rows with several stages all of them together."""
        return pricing.layers(self.request)

    @property
    def played(self) -> Plan:
        """The plan with what recompute=auto and codec=auto come to."""
        return pricing.settled(self.request).plan

    @property
    def trust(self) -> Trust:
        """How far the step's seconds may be off, and why."""
        ask = self.request
        return trust(ask.model, ask.plan, ask.cluster, ask.stack)

    @property
    def error_pct(self) -> float | None:
        """Mean relative error of such prices; None where no such model has been held beside measurements."""
        return 100.0 * self.trust.error if self.request.known else None

    @property
    def trusted(self) -> str:
        """The same in words."""
        if self.error_pct is None:
            return "no model of this kind has been held beside measurements"
        return f"which is right within about {self.error_pct:.0f} % on average"

    @property
    def rate(self) -> float:
        """Tokens per second; of models whose samples have none, samples."""
        return self.request.batch * self.request.model.context / self.price.step

    @property
    def days(self) -> float:
        return self.price.step * self.request.steps / 86400.0


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


def closed(ask: PlanRequest) -> Price:
    """The price by closed forms, without playing its timetable: for studies that ask many."""
    return with_waits(pricing.closed(ask), ask)


def rate(ask: PlanRequest) -> float:
    """Tokens per second by closed forms."""
    return ask.batch * ask.model.context / closed(ask).step


def simulate(ask: PlanRequest) -> PlanResult:
    """The answer, whether it fits or not."""
    got = price(ask)
    bubble = got.idle / (got.idle + got.busiest) if ask.plan.pp > 1 else 0.0
    return PlanResult(ask, with_waits(got, ask), verdict(ask), bubble)


def gain(answer: PlanResult, other: PlanResult) -> float:
    """Share of the other's step that an answer saves."""
    return 1.0 - answer.price.step / other.price.step


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


def gib(memory: Memory) -> dict[str, float]:
    parts = ("params", "grads", "optim", "activations", "communication", "slack", "total")
    return {name: getattr(memory, name) / GIB for name in parts}

"""One plan on one cluster: seconds, memory and traffic."""

from dataclasses import dataclass

from unisono.plan import Plan
from unisono.planner import pricing
from unisono.planner.error_bars import Trust, trust
from unisono.planner.memory import Memory, MemoryVerdict
from unisono.planner.price_parts import Price
from unisono.planner.pricing import price, verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stalls import with_waits

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
        """`error_pct` in words."""
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


def gib(memory: Memory) -> dict[str, float]:
    parts = ("params", "grads", "optim", "activations", "communication", "slack", "total")
    return {name: getattr(memory, name) / GIB for name in parts}

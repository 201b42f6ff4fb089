"""Price and verdict of a question without playing its timetable: for studies that ask many. In one place."""

from unisono.planner.memory import MemoryVerdict
from unisono.planner.price import Price
from unisono.planner.priced import price, verdict
from unisono.planner.simulate import Question
from unisono.planner.waits import with_waits


def priced(ask: Question) -> Price:
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return with_waits(price(ask.model, ask.plan, ask.cluster, ask.stack, **sizes), ask)


def judged(ask: Question) -> MemoryVerdict:
    return verdict(
        ask.model, ask.plan, ask.stack, ask.cluster, micro_batch=ask.micro_batch, micros=ask.micros
    )


def rate(ask: Question) -> float:
    """Tokens per second."""
    return ask.batch * ask.model.context / priced(ask).step

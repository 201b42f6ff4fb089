"""Devices under a stack of software: a request's price, memory and timetable."""

from unisono.plan import Plan
from unisono.planner.memory import MemoryVerdict, fullest
from unisono.planner.model_kinds import attending, kind
from unisono.planner.pipeline_play import costs, span, with_play
from unisono.planner.price import price as composed
from unisono.planner.price_parts import Price, Rows
from unisono.planner.request import PlanRequest
from unisono.programs.pipeline import Placed, Timetable, play_costs


def unmeasured(plan: Plan) -> tuple[str, ...]:
    """Nothing: a stack says what software makes of any device."""
    return ()


def modes(ask: PlanRequest) -> tuple[str, ...]:
    """Selective recomputation leaves out the scores, which fused attention does not keep."""
    kept = attending(ask.model) is not None and not ask.stack.fused_attention
    return ("none", "selective") if kept else ("none",)


def closed(ask: PlanRequest) -> Price:
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return composed(ask.model, ask.plan, ask.cluster, ask.stack, **sizes)


def price(ask: PlanRequest) -> Price:
    return with_timetable(ask, closed(ask), rows(ask)) if ask.plan.pp > 1 else closed(ask)


def with_timetable(ask: PlanRequest, got: Price, each: Rows) -> Price:
    """The price with its timetable played, where there is one."""
    schedule = ask.plan.schedule
    whole = span(schedule, ask.model.n_layer, ask.micros, each)
    return got if whole is None else with_play(got, whole, ask.micros, schedule, each)


def rows(ask: PlanRequest) -> Rows:
    """What each row of the pipeline takes for one micro-batch."""
    return kind(ask.model).passes(ask.model, ask.plan, ask.cluster, ask.stack, ask.micro_batch, 1).rows


def verdict(ask: PlanRequest) -> MemoryVerdict:
    found = kind(ask.model).memories(ask.model, ask.plan, ask.stack, ask.micro_batch, ask.micros)
    return fullest(found, ask.cluster.device)


def layers(ask: PlanRequest) -> tuple[float, ...]:
    return kind(ask.model).layers(ask.model, ask.plan, ask.stack.balanced)


def placed(ask: PlanRequest, timetable: Timetable) -> list[Placed]:
    return drawn(ask, timetable, rows(ask))


def drawn(ask: PlanRequest, timetable: Timetable, each: Rows) -> list[Placed]:
    """The timetable against the clock, as it is priced: each computation with the messages that wait for it."""
    return play_costs(timetable, *costs(ask.plan.schedule, timetable, each))

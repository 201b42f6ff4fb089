"""The price of a request: a kind of model says what a step does, a machine how long that takes."""

from dataclasses import replace
from typing import Protocol, cast

from unisono.plan import Plan
from unisono.plan.grammar import choice, member
from unisono.planner import devices, offload
from unisono.planner.grouping import is_uniform, stages_in
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import MemoryVerdict
from unisono.planner.model_kinds import Model, attending, kind
from unisono.planner.offload import with_homes
from unisono.planner.pipeline_play import costs, span, with_play
from unisono.planner.price_parts import Price, Rows
from unisono.planner.recompute import fewest
from unisono.planner.request import PlanRequest
from unisono.programs.pipeline import Placed, Timetable, play_costs
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed

__all__ = ["Model"]


class Machine(Protocol):
    """The devices of a request, under a stack: equal ones (`devices`), or a kind for each row (`heterogeneous`)."""

    def closed(self, ask: PlanRequest, /) -> Price:
        """Seconds of a step by closed forms."""
        ...

    def rows(self, ask: PlanRequest, /) -> Rows:
        """Seconds of one micro-batch on each row of the pipeline."""
        ...

    def verdict(self, ask: PlanRequest, /) -> MemoryVerdict:
        """Memory of the fullest rank, and whether it fits."""
        ...


def machine(cluster: Cluster) -> Machine:
    """The functions that price plans on this cluster."""
    if cluster.rows:
        return cast(Machine, contributed("unisono.planner.heterogeneous"))
    return devices


def price(ask: PlanRequest) -> Price:
    """Return the seconds of a step with its timetable played. Raises UsageError where a plan has no price."""
    ask = settled(ask)
    where, schedule = machine(ask.cluster), ask.plan.schedule
    price = where.closed(ask)
    if ask.plan.pp > 1:
        rows = where.rows(ask)
        seconds = span(schedule, ask.model.n_layer, ask.micros, rows)
        price = price if seconds is None else with_play(price, seconds, ask.micros, schedule, rows)
    return with_homes(price, ask)


def closed(ask: PlanRequest) -> Price:
    """Return the seconds of a step by closed forms. Raises UsageError where a plan has no price."""
    ask = settled(ask)
    return with_homes(machine(ask.cluster).closed(ask), ask)


def verdict(ask: PlanRequest) -> MemoryVerdict:
    """Return the memory of the fullest rank, and whether it fits. Raises UsageError where a plan has no price."""
    first, *_ = _rungs(ask)
    ask = _again(first)
    return offload.verdict(ask, machine(ask.cluster).verdict(ask))


def layers(ask: PlanRequest) -> tuple[float, ...]:
    """Blocks of each row of the pipeline, stem and head not counted."""
    return kind(ask.model).layers(ask.model, ask.plan, ask.stack.balanced)


def placed(ask: PlanRequest, timetable: Timetable) -> list[Placed]:
    """When each pass of each row runs in the priced step, with the messages that wait for it."""
    ask = settled(ask)
    return play_costs(timetable, *costs(ask.plan.schedule, timetable, machine(ask.cluster).rows(ask)))


def modes(ask: PlanRequest) -> tuple[str, ...]:
    """Values that recompute=auto may take, the quickest first. `selective` leaves out the scores of attention, which
    fused attention does not keep."""
    written = attending(ask.model) is not None and not ask.stack.fused_attention
    return ("none", "selective") if written else ("none",)


def settled(ask: PlanRequest) -> PlanRequest:
    """Resolve what a plan leaves open: recompute=auto as in `_again`, and a codec that is chosen by measuring as it
    would be if steps took what they are priced at. Raises UsageError where a plan has no price."""
    every = _rungs(ask)
    asks = [_again(request) for request in every]
    codec = member("codec", ask.plan.codec)
    if len(asks) == 1 or codec is None:
        return asks[0]
    where = machine(ask.cluster)
    return asks[codec.taken([with_homes(where.closed(request), request).step for request in asks])]


def _rungs(ask: PlanRequest) -> list[PlanRequest]:
    """Return the request once for each codec that a choice has. On one host replicas meet in memory, where the first
    is taken."""
    codec = member("codec", ask.plan.codec)
    names = list(codec.rungs) if codec is not None and ask.plan.dp > 1 else []
    if ask.cluster.cores:
        names = names[:1]
    requests = [replace(ask, plan=replace(ask.plan, codec=name)) for name in names] or [ask]
    for request in requests:
        _known(request)
    return requests


def _again(ask: PlanRequest) -> PlanRequest:
    """Resolve recompute=auto: as few blocks as fit, where blocks have prices of their own; else the fastest mode that
    fits; `full` where nothing fits."""
    if ask.plan.recompute != "auto":
        return ask
    where, model = machine(ask.cluster), attending(ask.model)
    quick = modes(ask)

    def played(recompute: str) -> PlanRequest:
        return replace(ask, plan=replace(ask.plan, recompute=recompute))

    def fit_of(request: PlanRequest) -> MemoryVerdict:
        return offload.verdict(request, where.verdict(request))

    if model is None or ask.cluster.rows:
        return next((request for request in map(played, quick) if fit_of(request).fits), played("full"))

    def lacking(plan: Plan) -> int | None:
        got = fit_of(played(plan.recompute))
        return None if got.fits else got.row

    stages = stages_in(model, ask.plan, layers(ask))
    fitting = fewest(ask.plan, *stages, lacking, selective="selective" in quick)
    return played("full" if fitting is None else fitting.recompute)


def _known(ask: PlanRequest) -> None:
    """Raises UsageError where a plan has no price: unknown policies, codecs and collectives, and blocks that are played
    in several ways where a model has none, or where rows lie on unlike devices."""
    plan = ask.plan
    strange = {key for key in ("sync", "codec", "collective") if member(key, getattr(plan, key)) is None}
    if not is_uniform(plan) and (attending(ask.model) is None or ask.cluster.rows):
        strange |= {"blocks", "recompute"} if choice(plan.recompute).options else {"blocks"}
    order = ("sync", "codec", "collective", "recompute", "blocks")
    for key in sorted(strange, key=order.index):
        value, usual = getattr(plan, key), getattr(Plan(), key)
        if value != usual:
            raise UsageError(
                f"{key}={value} has no price on {ask.cluster.name}, where it was never measured",
                where=f"plan.{key}",
                fix=f"{key}={usual}; unisono train runs a named plan without a price",
                code="C22",
            )

"""What a step waits for beside its own work: ranks that are slow today, and data that is not there yet.

A host prepares the next batches while its devices compute. Reading, decoding and handing over work side by side, so the
slowest of them sets the pace, and only what takes longer than all else of a step is waited for (the stall analysis of
Mohan et al., "Analyzing and mitigating data stalls in DNN training", 2021).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.machines.order import stride
from unisono.planner.price_parts import Price
from unisono.planner.request import PlanRequest, StepTimes
from unisono.planner.work.sample import Sample

_PLAYED = 256  # steps of a seeded draw


@dataclass(frozen=True, slots=True)
class Loading:
    """One step's samples. hosts: that load, those of the first stage. each: samples that one of them loads. tokens: of
    a sample, 1 of what has none. rates: samples/s that a host gives, by what limits it; what nobody has said is not
    there. said: whether it is known what the loader itself gives."""

    hosts: int
    each: int
    tokens: int
    sample: Sample
    rates: Mapping[str, float]
    said: bool

    @property
    def limit(self) -> tuple[str, float]:
        """(what is slowest, samples/s of one host); infinitely many where nothing is known."""
        return min(self.rates.items(), key=lambda pair: pair[1], default=("", float("inf")))

    @property
    def seconds(self) -> float:
        """Of loading one step's samples."""
        return self.each / self.limit[1]


def fed(ask: PlanRequest) -> Loading:
    """What the request's plan asks of each host. Ranks that work on the same samples read them once a host."""
    model, plan, cluster = ask.model, ask.plan, ask.cluster
    loader, samples = cluster.loader, ask.micro_batch * ask.micros
    host = min(loader.devices or cluster.node, cluster.devices)

    def here(axis: str) -> int:
        """Ranks of an axis' group that lie on one host."""
        return min(getattr(plan, axis), max(1, host // stride(plan, axis, cluster.order)))

    readers = here("dp") * here("shard")
    spread = ceil(plan.tp / here("tp")) * ceil(plan.cp / here("cp"))
    stored = loader.stored or model.sample.stored
    rates: dict[str, float] = {}
    if loader.samples:
        rates["decoding"] = loader.samples
    if loader.bandwidth and stored:
        rates["storage"] = loader.bandwidth / stored
    if cluster.device.host and model.sample.copied:
        rates["copying to devices"] = (
            readers * cluster.device.host * ask.stack.host_link / model.sample.copied
        )
    return Loading(
        hosts=ceil(plan.replicas / readers) * spread,
        each=samples * readers,
        tokens=model.context,
        sample=Sample(stored, model.sample.copied),
        rates=rates,
        said=bool(loader.samples or loader.bandwidth),
    )


def with_waits(got: Price, ask: PlanRequest) -> Price:
    """The price with stragglers, where any are asked for, and with what data is waited for beyond all else.

    Random is what ranks do between meetings with other replicas. Where replicas do not all meet in every step, the
    policy plays `_PLAYED` steps of a seeded draw.
    """
    plan, late = ask.plan, 0.0
    if ask.stragglers is not None:
        alone = got.bare.step - (got.comm["dp"].exposed if "dp" in got.comm else 0.0)
        late = alone * (_pace(plan, ask.stragglers) - 1.0)
    data = max(0.0, fed(ask).seconds - got.step - late)
    if not late and not data:
        return got
    return replace(got, step=got.step + late + data, straggling=late, loading=data)


def _pace(plan: Plan, times: StepTimes) -> float:
    """Mean time of a step beside that of a rank by itself."""
    policy = member("sync", plan.sync)
    if policy is None or (policy.equal and policy.rhythm == 1):
        return times.slowest(plan.world)
    return policy.pace(times.durations(plan.dp, plan.world // plan.dp, _PLAYED))

"""One plan on a mixture of devices: where its ranks lie, what a step takes there, and whether it fits.

Two ways to use pools of different devices: rows of one pipeline lie on whole pools or parts of them, each row with as
many layers as suits its device; or each pool has whole replicas, and the slower ones set the pace.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from unisono.plan import Plan
from unisono.planner import memory
from unisono.planner.collectives import bus
from unisono.planner.cuts import rows_of
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.mixture import Mixture
from unisono.planner.machines.order import stride
from unisono.planner.mixed_lane import MixedPipeline, MixedRow, MixedShared, Way, lane
from unisono.planner.price import Price
from unisono.planner.stack import Stack
from unisono.planner.timetables import serves
from unisono.planner.trust import Trust, trust
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

_ORDERED = 4  # pools of which every order is tried


@dataclass(frozen=True, slots=True)
class MixedQuestion:
    """What is asked: `micros` micro-batches of `micro_batch` samples on each data rank, for `steps` steps."""

    model: Transformer
    plan: Plan
    mixture: Mixture
    stack: Stack
    micro_batch: int
    micros: int
    steps: int = 0

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micros * self.plan.replicas


@dataclass(frozen=True, slots=True)
class Placement:
    """Pools in the order in which they are used, and how many rows of the pipeline (stages) or replicas each has."""

    kind: Literal["stages", "replicas"]
    order: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """(pool, how many)."""
        return tuple(zip(self.order, self.counts, strict=True))


@dataclass(frozen=True, slots=True)
class MixedAnswer:
    """A placement, its pipelines (one, or one for each pool), the step of the slowest of them, the share of the
    pipeline's time in which its busiest row waits."""

    question: MixedQuestion
    placement: Placement
    lanes: tuple[MixedPipeline, ...]
    price: Price
    bubble: float

    @property
    def short(self) -> float:
        """Bytes that are missing on the rank that lacks most, 0 where all fit."""
        return max(one.short for one in self.lanes)

    @property
    def fits(self) -> bool:
        return self.short == 0.0

    @property
    def tightest(self) -> tuple[int, MixedRow]:
        """The row that lacks most or has least left for its size, and its place in its pipeline."""
        rows = [(place, row) for one in self.lanes for place, row in enumerate(one.rows)]
        return max(rows, key=lambda pair: (pair[1].short, pair[1].memory.total / pair[1].capacity))

    @property
    def peak(self) -> float:
        """FLOP/s of all devices of the plan together, at their peaks."""
        ask, pools = self.question, self.question.mixture.pools
        ranks = ask.plan.world // sum(self.placement.counts)
        return sum(
            count * ranks * pools[pool].device.flops(ask.plan.precision)
            for pool, count in self.placement.pools
        )

    @property
    def tflops(self) -> float:
        """10^12 FLOP/s of the mean device, recomputation not counted."""
        ask = self.question
        return ask.model.step_flops(ask.batch) / ask.plan.world / self.price.step / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak of all devices together."""
        return self.tflops * 1e12 * self.question.plan.world / self.peak

    @property
    def trust(self) -> Trust:
        """How far the step may be off: as on the pool that is known least."""
        ask = self.question
        used = [ask.mixture.pools[pool] for pool, _ in self.placement.pools]
        return max((trust(ask.model, ask.plan, pool, ask.stack) for pool in used), key=lambda one: one.error)

    @property
    def days(self) -> float:
        return self.price.step * self.question.steps / 86400.0


def simulate(ask: MixedQuestion, bench: MixedShared | None = None) -> tuple[MixedAnswer, ...]:
    """Every placement of the plan: those that fit first, the fastest first. Raises UsageError where there is none."""
    bench = bench or MixedShared(ask.model, ask.mixture, ask.stack)
    found = [placed(ask, bench, one) for one in placements(ask.mixture, ask.plan)]
    if not found:
        raise _nowhere(ask.mixture, ask.plan)
    return tuple(sorted(found, key=lambda one: (one.short, one.price.step)))


def placements(mixture: Mixture, plan: Plan) -> Iterator[Placement]:
    """All ways to lay the plan's rows, or its replicas, on pools; pools are filled one after the other."""
    sizes = [pool.devices for pool in mixture.pools]
    pools = range(len(sizes))
    orders = list(permutations(pools)) if len(sizes) <= _ORDERED else [tuple(pools), tuple(reversed(pools))]
    seen: set[Placement] = set()
    kinds: tuple[tuple[Literal["stages", "replicas"], int], ...] = (
        ("stages", plan.pp),
        ("replicas", plan.dp),
    )
    for kind, parts in kinds:
        for filled in orders:
            counts = _filled([sizes[pool] // (plan.world // parts) for pool in filled], parts)
            if counts is None:
                continue
            has = dict(zip(filled, counts, strict=True))
            for order in orders if kind == "stages" else orders[:1]:
                used = tuple(pool for pool in order if has[pool])
                one = Placement(kind, used, tuple(has[pool] for pool in used))
                if one not in seen and (kind == "stages" or len(used) > 1):
                    seen.add(one)
                    yield one


def _filled(rooms: list[int], parts: int) -> list[int] | None:
    """How many parts each of these places takes, one after the other; None where they are too many."""
    counts = []
    for room in rooms:
        counts.append(min(room, parts))
        parts -= counts[-1]
    return counts if parts == 0 else None


def placed(
    ask: MixedQuestion,
    bench: MixedShared,
    where: Placement,
    micros: tuple[int, ...] = (),
    cut: tuple[float, ...] | None = None,
) -> MixedAnswer:
    """The plan in one placement. micros: micro-batches of each replica by pool, where they do not have equally many.
    cut: blocks of each row of a pipeline over pools, None for the best."""
    plan = ask.plan
    if where.kind == "stages":
        rows = tuple(pool for pool, count in where.pools for _ in range(count))
        way = Way(rows, plan.dp, dict(enumerate(ask.mixture.pools)), cut)
        found = (lane(bench, plan, way, ask.micro_batch, ask.micros),)
    else:
        # Rows of different pools meet: they have the same layers.
        own_cut = tuple(rows_of(ask.model, plan.schedule, plan.pp, ask.stack.balanced))
        net = slowest(ask.mixture, plan)
        found = tuple(
            lane(bench, plan, Way((pool,) * plan.pp, count, {pool: net}, own_cut), ask.micro_batch, own)
            for (pool, count), own in zip(where.pools, micros or [ask.micros] * len(where.order), strict=True)
        )
    price = max((one.price for one in found), key=lambda one: one.step)
    return MixedAnswer(ask, where, found, price, price.idle / (price.idle + price.busiest))


def slowest(mixture: Mixture, plan: Plan) -> Cluster:
    """The network of replicas in different pools, as the pool sees it where it is slowest."""
    apart = stride(plan, "dp")
    seen = [mixture.seen_from(pool) for pool in range(len(mixture.pools))]
    return max(seen, key=lambda one: bus(one, apart, plan.dp).all_reduce(1e9))


def in_proportion(ask: MixedQuestion, where: Placement) -> tuple[MixedAnswer, tuple[int, ...]]:
    """(the step, micro-batches of each pool's replicas) if faster pools were given more of the batch; of replicas.

    Each pool in turn takes one more micro-batch a replica, the one that ends it first, until all are dealt.
    """
    bench = MixedShared(ask.model, ask.mixture, ask.stack)
    total = ask.micros * ask.plan.dp
    few, many = (placed(ask, bench, where, (m,) * len(where.order)) for m in (ask.micros, 2 * ask.micros))
    slopes = [
        (more.price.step - less.price.step) / ask.micros
        for less, more in zip(few.lanes, many.lanes, strict=True)
    ]
    starts = [one.price.step - ask.micros * slope for one, slope in zip(few.lanes, slopes, strict=True)]
    shares = [1] * len(slopes)
    while sum(share * count for share, count in zip(shares, where.counts, strict=True)) < total:
        next_one = min(range(len(shares)), key=lambda k: starts[k] + (shares[k] + 1) * slopes[k])
        shares[next_one] += 1
    return placed(ask, bench, where, tuple(shares)), tuple(shares)


def with_equal_layers(ask: MixedQuestion, where: Placement) -> MixedAnswer:
    """The same placement with layers dealt as for equal devices, which is how `train` cuts."""
    cut = tuple(rows_of(ask.model, ask.plan.schedule, ask.plan.pp, ask.stack.balanced))
    return placed(ask, MixedShared(ask.model, ask.mixture, ask.stack), where, cut=cut)


def remedies(ask: MixedQuestion) -> Iterator[tuple[str, Plan, int, int]]:
    """(what to change, the plan, its micro-batch, its micros) that need less memory and have a place."""
    model = ask.model
    for said, plan, micro_batch, micros in memory.remedies(
        ask.plan, ask.micro_batch, ask.micros, model.n_layer
    ):
        dealt = model.n_head % plan.tp == 0 and model.kv_heads % plan.tp == 0
        served = plan.pp == 1 or serves(plan.schedule, plan.pp, micros, model.n_layer)
        if dealt and served and next(placements(ask.mixture, plan), None) is not None:
            yield said, plan, micro_batch, micros


def _nowhere(mixture: Mixture, plan: Plan) -> UsageError:
    """Why a plan cannot be laid on the pools, and what could be."""
    row = plan.world // plan.pp
    sizes = " and ".join(f"{pool.devices} ({pool.name})" for pool in mixture.pools)
    whole = [pool.devices // row for pool in mixture.pools]
    what = f"a row of the pipeline takes {row} devices and there are {plan.pp} rows; the pools have {sizes}"
    if plan.dp > 1:
        what += f"; a replica takes {plan.inner} devices, and there are {plan.dp}"
    fix = "a row is dp*shard*cp*tp devices of one pool: " + (
        f"pp={sum(whole)} with rows of {row}" if sum(whole) else "smaller dp, shard or tp, and a greater pp"
    )
    return UsageError(what, where=f"{plan} on {mixture.name}", fix=fix, code="P14")

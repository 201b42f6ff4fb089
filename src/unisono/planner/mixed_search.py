"""The best plans for a mixture of devices: every legal mesh in every placement, and each pool alone beside them.

All plans are put in order by an estimate from below (the best cut into whole blocks, a filled pipeline, gradients), and
priced in that order, timetable and all, until the estimate of the next is no better than what was found.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

from unisono.plan import Plan
from unisono.planner import search, space
from unisono.planner.memory import kept_of, of_share, share_in
from unisono.planner.mixed import Answer, Placement, Question, placed, placements, slowest
from unisono.planner.mixed_lane import Bench, detail
from unisono.planner.price import gradients
from unisono.planner.simulate import Answer as Equal
from unisono.planner.timetables import chunks, in_flight, name_of
from unisono.spec.cluster import Cluster
from unisono.spec.mixture import Mixture
from unisono.spec.transformer import Transformer

_MOST = 300  # plans that are priced whole
_SURE = 1.03  # by how much an estimate may be above the price
_TENTH = 1.1  # of the memory, for what is not linear: buffers, and blocks that offloading keeps


@dataclass(frozen=True, slots=True)
class Alone:
    """One pool without the others: its best plan, None where none fits."""

    pool: Cluster
    best: Equal | None


@dataclass(frozen=True, slots=True)
class Found:
    """searched: plans in all their placements. priced: those that were priced whole; feasible: of these, that fit.
    best: one placement of each plan, the best first. nearest: what lacks least, where nothing fits."""

    searched: int
    priced: int
    feasible: int
    seconds: float
    best: tuple[Answer, ...]
    alone: tuple[Alone, ...]
    nearest: Answer | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    estimate: float
    plan: Plan
    micro_batch: int
    where: Placement


def within(base: space.Space, mixture: Mixture) -> space.Space:
    """The space of all devices together, as if they were one cluster: what legal meshes and batches are asked of."""
    host = min(pool.device.host for pool in mixture.pools)
    first = mixture.pools[0]
    together = replace(
        first, name=mixture.name, device=replace(first.device, host=host), devices=mixture.devices
    )
    return replace(base, cluster=together)


def find(base: space.Space, mixture: Mixture, top: int = 4) -> Found:
    """The `top` best plans, and each pool alone. Of base everything but the cluster is read."""
    begun = perf_counter()
    model = base.model
    if not isinstance(model, Transformer):
        raise TypeError("transformers alone are dealt to unlike devices")
    bench = Bench(model, mixture, base.stack)
    every = sorted(_candidates(bench, within(base, mixture)), key=lambda one: one.estimate)
    kept: dict[tuple[str, int], Answer] = {}
    roomiest, nearest = 0.0, None
    priced = feasible = 0
    for one in every:
        steps = sorted(answer.price.step for answer in kept.values())
        if priced >= _MOST or (len(steps) >= top and one.estimate > _SURE * steps[top - 1]):
            break
        room = room_for(bench, one.plan, one.where, one.micro_batch)
        if room < model.n_layer:
            if room > roomiest and not kept:
                roomiest, nearest = room, one
            continue
        answer = _answer(bench, one)
        priced += 1
        if not answer.fits:
            if not kept:
                roomiest, nearest = float("inf"), one
            continue
        feasible += 1
        key = str(one.plan), one.micro_batch
        if key not in kept or answer.price.step < kept[key].price.step:
            kept[key] = answer
    best = sorted(kept.values(), key=lambda answer: (answer.price.step, answer.tightest[1].memory.total))
    alone = tuple(_alone(base, pool) for pool in mixture.pools)
    short = _answer(bench, nearest) if nearest is not None and not best else None
    return Found(len(every), priced, feasible, perf_counter() - begun, tuple(best[:top]), alone, short)


def _answer(bench: Bench, one: _Candidate) -> Answer:
    ask = Question(bench.model, one.plan, bench.mixture, bench.stack, one.micro_batch, one.plan.micros or 1)
    return placed(ask, bench, one.where)


def _alone(base: space.Space, pool: Cluster) -> Alone:
    found = search.search(replace(base, cluster=pool), top=1)
    return Alone(pool, found.best[0] if found.best else None)


def _candidates(bench: Bench, base: space.Space) -> Iterator[_Candidate]:
    guess = _Estimates(bench)
    for mesh in space.meshes(base):
        where = list(placements(bench.mixture, mesh.plan))
        if not where:
            continue
        for plan, micro_batch in space.plans(mesh, bench.model.n_layer):
            if name_of(plan.schedule) != "dualpipe" and plan.recompute != "auto":
                for one in where:
                    yield _Candidate(guess.step(plan, one, micro_batch), plan, micro_batch, one)


class _Estimates:
    """Seconds of a step that a plan can hardly go under."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._blocks: dict[object, float] = {}
        self._rows: dict[object, float] = {}
        self._meeting: dict[object, float] = {}

    def step(self, plan: Plan, where: Placement, micro_batch: int) -> float:
        micros = plan.micros or 1
        each = [(self._block(plan, pool, micro_batch), count) for pool, count in where.pools]
        if where.kind == "stages":
            row = self._row(tuple(each))
        else:
            row = -(-self._bench.model.n_layer // plan.pp) * max(block for block, _ in each)
        passes = micros + (plan.pp - 1) / chunks(plan.schedule)
        return passes * row + self._gradients(plan, where, row)

    def _block(self, plan: Plan, pool: int, micro_batch: int) -> float:
        """Seconds of one block and micro-batch, forward and backward."""
        key = (
            pool, plan.tp, plan.cp, plan.ep, plan.cp_kind, plan.shard, plan.zero, plan.recompute, plan.offload,
            plan.precision, name_of(plan.schedule), micro_batch,
        )  # fmt: skip
        if key not in self._blocks:
            got = detail(self._bench, plan, pool, micro_batch).blocks
            self._blocks[key] = got.forward + got.backward
        return self._blocks[key]

    def _row(self, each: tuple[tuple[float, int], ...]) -> float:
        """Seconds of the dearest row of the best cut into whole blocks, stem and head left out."""
        if each not in self._rows:
            self._rows[each] = least_row(self._bench.model.n_layer, each)
        return self._rows[each]

    def _gradients(self, plan: Plan, where: Placement, row: float) -> float:
        """What shows of gradients that meet, beside two thirds of a row's micro-batch."""
        if plan.replicas == 1:
            return 0.0
        key = plan.dp, plan.shard, plan.zero, plan.tp, plan.cp, plan.pp, plan.collective, where, round(row, 6)
        if key not in self._meeting:
            bench = self._bench
            share = share_in(bench.model, plan, 0, [bench.model.n_layer / plan.pp] * plan.pp)
            nets = [slowest(bench.mixture, plan)] if where.kind == "replicas" else bench.mixture.pools
            shown = [gradients(plan, net, bench.stack, share, 2 / 3 * row) for net in nets]
            self._meeting[key] = min(sum(t.exposed for t in one.values()) for one in shown)
        return self._meeting[key]


def room_for(bench: Bench, plan: Plan, where: Placement, micro_batch: int) -> float:
    """Blocks that all rows of the slimmest pipeline have memory for together, hardly less than there are in truth: a
    row's bytes are taken as linear in its blocks and in what it holds of them, and memory as a tenth more."""
    kept = kept_of(bench.model, plan, bench.stack, micro_batch)

    def of(row: int, layers: float, held: float) -> float:
        share = share_in(bench.model, plan, row, [layers] * plan.pp)
        return of_share(bench.model, plan, bench.stack, share, kept, held, 0.0).total

    def line(row: int) -> tuple[float, float, float, float]:
        """Bytes of one block and one micro-batch held; more of a second block, micro-batch, of either beside both."""
        one, two, more = of(row, 1, 1), of(row, 2, 1), of(row, 1, 2)
        return one, two - one, more - one, of(row, 2, 2) - two - more + one

    last = plan.pp - 1
    lines = {row: line(row) for row in {0, min(1, last), last}}
    rooms: list[float] = []
    begun = 0
    for pool, count in where.pools:
        device = bench.mixture.pools[pool].device
        capacity = _TENTH * (device.memory - device.reserved)
        room = 0.0
        for row in range(begun, begun + count) if where.kind == "stages" else range(plan.pp):
            one, block, held, both = lines[row if row in lines else 1]
            more = in_flight(plan.schedule, row, plan.pp, plan.micros or 1) - 1
            room += max(0.0, (capacity - one - held * more) // (block + both * more) + 1)
        begun += count
        rooms.append(room)
    return sum(rooms) if where.kind == "stages" else min(rooms)


@cache
def least_row(blocks: int, each: tuple[tuple[float, int], ...]) -> float:
    """The least that the dearest of all rows can cost; each: (cost of a block, rows) of each kind of device."""

    def room(limit: float) -> int:
        return sum(count * max(1, int(limit / cost * (1 + 1e-12))) for cost, count in each)

    options = sorted({cost * n for cost, _ in each for n in range(1, blocks + 1)})
    low, high = 0, len(options) - 1
    while low < high:
        middle = (low + high) // 2
        if room(options[middle]) >= blocks:
            high = middle
        else:
            low = middle + 1
    # Every row has one block at least.
    return max(options[low], *(cost for cost, _ in each))

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
from unisono.planner.collectives import message
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.mixture import Mixture
from unisono.planner.machines.order import stride
from unisono.planner.memory import kept_of, of_share, share_in
from unisono.planner.mixed import MixedAnswer, MixedQuestion, Placement, placed, placements, slowest
from unisono.planner.mixed_lane import MixedShared, detail
from unisono.planner.price import gradients, message_bytes
from unisono.planner.simulate import Answer as Equal
from unisono.planner.timetables import chunks, in_flight, name_of
from unisono.planner.work.transformer import Transformer

# (seconds of a block, seconds beside its blocks, rows) of each kind of row, of one micro-batch forward and backward.
Kinds = tuple[tuple[float, float, int], ...]

_MOST = 300  # plans that are priced whole
_SURE = 1.03  # by how much an estimate may be above the price
_LESS = 0.9  # of the layers that a row would have if all rows took as long as the dearest
_TENTH = 1.1  # of the memory, for what is not linear: buffers


@dataclass(frozen=True, slots=True)
class Alone:
    """One pool without the others: its best plan, None where none fits."""

    pool: Cluster
    best: Equal | None


@dataclass(frozen=True, slots=True)
class MixedFound:
    """searched: plans in all their placements. priced: those that were priced whole; feasible: of these, that fit.
    best: one placement of each plan, the best first. nearest: what lacks least, where nothing fits."""

    searched: int
    priced: int
    feasible: int
    seconds: float
    best: tuple[MixedAnswer, ...]
    alone: tuple[Alone, ...]
    nearest: MixedAnswer | None = None


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


def find(base: space.Space, mixture: Mixture, top: int = 4) -> MixedFound:
    """The `top` best plans, and each pool alone. Of base everything but the cluster is read."""
    begun = perf_counter()
    model = base.model
    if not isinstance(model, Transformer):
        raise TypeError("transformers alone are dealt to unlike devices")
    bench = MixedShared(model, mixture, base.stack)
    every = sorted(_candidates(bench, within(base, mixture)), key=lambda one: one.estimate)
    kept: dict[tuple[str, int], MixedAnswer] = {}
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
    return MixedFound(len(every), priced, feasible, perf_counter() - begun, tuple(best[:top]), alone, short)


def _answer(bench: MixedShared, one: _Candidate) -> MixedAnswer:
    ask = MixedQuestion(
        bench.model, one.plan, bench.mixture, bench.stack, one.micro_batch, one.plan.micros or 1
    )
    return placed(ask, bench, one.where)


def _alone(base: space.Space, pool: Cluster) -> Alone:
    found = search.search(replace(base, cluster=pool), top=1)
    return Alone(pool, found.best[0] if found.best else None)


def _candidates(bench: MixedShared, base: space.Space) -> Iterator[_Candidate]:
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

    def __init__(self, bench: MixedShared) -> None:
        self._bench = bench
        self._blocks: dict[object, tuple[float, float]] = {}
        self._rows: dict[tuple[Kinds, float], tuple[float, float]] = {}
        self._meeting: dict[object, float] = {}

    def step(self, plan: Plan, where: Placement, micro_batch: int) -> float:
        stack, micros = self._bench.stack, plan.micros or 1
        fixed = stack.step + stack.micro * micros
        if where.kind == "stages":
            ends = min(self._block(plan, pool, micro_batch)[1] for pool in where.order)
            row, others = self._line(plan, self._kinds(plan, where, micro_batch), ends)
        else:
            row = max(self._replica(plan, pool, count, micro_batch) for pool, count in where.pools)
            others = (plan.pp - 1) * row
        # The dearest row is busy all the time, and the others fill and drain the pipeline.
        return (
            micros * row
            + others / chunks(plan.schedule)
            + self._gradients(plan, where, row, micro_batch)
            + fixed
        )

    def _line(self, plan: Plan, kinds: Kinds, ends: float) -> tuple[float, float]:
        """Seconds of the dearest row, and of all others together. ends: of stem and head."""
        key = kinds, ends
        if key not in self._rows:
            n = self._bench.model.n_layer
            # If layers could be cut anywhere, all rows would take as long.
            work = (
                n
                + sum(rows * beside / one for one, beside, rows in kinds)
                + ends / max(one for one, _, _ in kinds)
            )
            ideal = work / sum(rows / one for one, _, rows in kinds)
            row = max(ideal, least_row(n, kinds))
            self._rows[key] = row, max(0.0, plan.pp * ideal - row)
        return self._rows[key]

    def _kinds(self, plan: Plan, where: Placement, micro_batch: int) -> Kinds:
        found: list[tuple[float, float, int]] = []
        last = len(where.order) - 1
        over = self._message(plan, self._bench.mixture.across, plan.dp, 2, micro_batch) if last else 0.0
        for place, (pool, count) in enumerate(where.pools):
            one = self._block(plan, pool, micro_batch)[0]
            inside = self._message(plan, self._bench.mixture.pools[pool], plan.dp, count, micro_batch)
            edges = min(count, (place > 0) + (place < last))
            found += [(one, inside, count - edges), (one, max(inside, over), edges)]
        return tuple(kind for kind in found if kind[2])

    def _replica(self, plan: Plan, pool: int, count: int, micro_batch: int) -> float:
        """Seconds of a row of a replica in one pool."""
        one, ends = self._block(plan, pool, micro_batch)
        beside = self._message(plan, self._bench.mixture.pools[pool], count, plan.pp, micro_batch)
        n = self._bench.model.n_layer
        return max(-(-n // plan.pp) * one, (n * one + ends) / plan.pp) + beside

    def _message(self, plan: Plan, net: Cluster, replicas: int, ranks: int, micro_batch: int) -> float:
        """Seconds of a row's messages for one micro-batch, there and back."""
        if ranks == 1:
            return 0.0
        bench, apart = self._bench, replicas * stride(plan, "dp")
        moved = message_bytes(bench.model, plan, bench.stack, micro_batch)
        far = 1 if net.name == bench.mixture.name else apart  # over the join everything is as far
        return 2 * chunks(plan.schedule) * message(net, far, moved, bench.stack.p2p, ranks)

    def _block(self, plan: Plan, pool: int, micro_batch: int) -> tuple[float, float]:
        """Seconds of one block and micro-batch, forward and backward, and of stem and head."""
        key = (
            pool, plan.tp, plan.cp, plan.ep, plan.cp_kind, plan.shard, plan.zero, plan.recompute,
            plan.precision, name_of(plan.schedule), micro_batch,
        )  # fmt: skip
        if key not in self._blocks:
            got = detail(self._bench, plan, pool, micro_batch).blocks
            self._blocks[key] = got.forward + got.backward, sum(got.stem) + sum(got.head)
        return self._blocks[key]

    def _gradients(self, plan: Plan, where: Placement, row: float, micro_batch: int) -> float:
        """What shows of gradients that meet beside two thirds of a row's micro-batch, most on a row of any pool."""
        if plan.replicas * plan.cp == 1:
            return 0.0
        mesh = plan.dp, plan.shard, plan.tp, plan.cp, plan.pp, plan.ep
        key = *mesh, plan.zero, plan.micros, plan.collective, where, round(row, 6)
        if key not in self._meeting:
            model, stack = self._bench.model, self._bench.stack
            found: list[float] = []
            for place, pool in enumerate(where.order):
                layers, net = model.n_layer / plan.pp, slowest(self._bench.mixture, plan)
                if where.kind == "stages":
                    net = self._bench.mixture.pools[pool]
                    layers = min(
                        model.n_layer, max(1.0, _LESS * row / self._block(plan, pool, micro_batch)[0])
                    )
                share = share_in(model, plan, plan.pp - 1 if place else 0, [layers] * plan.pp)
                shown = gradients(plan, net, stack, share, 2 / 3 * row, plan.micros or 1)
                found.append(sum(t.exposed for t in shown.values()))
            self._meeting[key] = max(found)
        return self._meeting[key]


def room_for(bench: MixedShared, plan: Plan, where: Placement, micro_batch: int) -> float:
    """Blocks that all rows of the slimmest pipeline have memory for together, hardly less than there are in truth: a
    row's bytes are taken as linear in its blocks and in what it holds of them, and memory as a tenth more."""
    kept = kept_of(bench.model, plan, bench.stack, micro_batch)

    def of(row: int, layers: float, held: float) -> float:
        share = share_in(bench.model, plan, row, [layers] * plan.pp)
        return of_share(bench.model, plan, bench.stack, share, kept, held).total

    def line(row: int) -> tuple[float, float, float, float]:
        """Bytes of one block and one micro-batch held; more of a second block, micro-batch, of either beside both."""
        one, two, more = of(row, 1, 1), of(row, 2, 1), of(row, 1, 2)
        return one, two - one, more - one, of(row, 2, 2) - two - more + one

    last = plan.pp - 1
    lines = {row: line(row) for row in {0, min(1, last), last}}
    rooms: list[float] = []
    begun = 0
    for pool, count in where.pools:
        capacity = _TENTH * bench.mixture.pools[pool].device.room
        room = 0.0
        for row in range(begun, begun + count) if where.kind == "stages" else range(plan.pp):
            one, block, held, both = lines[row if row in lines else 1]
            more = in_flight(plan.schedule, row, plan.pp, plan.micros or 1) - 1
            room += max(0.0, (capacity - one - held * more) // (block + both * more) + 1)
        begun += count
        rooms.append(room)
    return sum(rooms) if where.kind == "stages" else min(rooms)


@cache
def least_row(blocks: int, kinds: Kinds) -> float:
    """The least that the dearest of all rows can cost: the best cut into whole blocks, at least one a row."""

    def room(limit: float) -> int:
        return sum(rows * max(1, int((limit - beside) / one * (1 + 1e-12))) for one, beside, rows in kinds)

    options = sorted({one * n + beside for one, beside, _ in kinds for n in range(1, blocks + 1)})
    low, high = 0, len(options) - 1
    while low < high:
        middle = (low + high) // 2
        if room(options[middle]) >= blocks:
            high = middle
        else:
            low = middle + 1
    return max(options[low], *(one + beside for one, beside, _ in kinds))

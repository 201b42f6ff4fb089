"""Search the best plans for a cluster, and the front of plans that nothing beats in time, memory and cost at once.

Meshes are taken in the order of a lower bound of their step. A mesh whose model states alone do not fit is not
priced. With all keys, neither is one that a plan already found beats in both bounds. The rest are priced as arrays,
and some hundred of the fastest by event simulation.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from unisono.plan import Plan
from unisono.planner.error_bars import untried
from unisono.planner.grouping import is_uniform
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import MARGIN
from unisono.planner.mixed_blocks import between
from unisono.planner.model_kinds import attending
from unisono.planner.pipeline_play import actions, span
from unisono.planner.pricing import closed, verdict
from unisono.planner.screen import Screened, least_memory, least_seconds, screen
from unisono.planner.search_arrays import Array, SearchShared, like
from unisono.planner.simulate import PlanRequest, PlanResult, gain, simulate
from unisono.planner.space import CHUNKS, MeshSizes, Space, meshes, overlaps, places, plan_at, plans
from unisono.planner.space import in_chunks as chunked
from unisono.planner.tie_breaks import simplest

__all__ = ["Ranking", "Space", "answer_at", "candidates", "on_fewer", "pricer", "search", "smallest"]
_MOST_NODES = 1 << 14
_WORTH = 0.01  # of a step, what more chunks of tp, or ranges of blocks, have to save
_KEPT, _PLAYED, _FRONT = 400, 200, 24
_SURER = 32  # of plans without what was never measured, those that are played
_MIXED = 32  # of the best plans, those whose blocks are looked at one by one
_ACTIONS = 1_500_000  # that the best plans' timetables may have together, beyond the first few plans


@dataclass(frozen=True, slots=True)
class Counts:
    """Plans. searched: all that are legal. too_large: not priced, since their model states alone do not fit.
    dominated: not priced, since another is quicker and smaller. priced: the rest. feasible: of those, that fit.
    played: of the quickest, by event simulation; of several that cost the same the first alone."""

    searched: int = 0
    too_large: int = 0
    dominated: int = 0
    priced: int = 0
    feasible: int = 0
    played: int = 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """best: answers, the best first; of those that prices cannot tell apart the surest first (see `tie_breaks`).
    front: answers of which none is slower and larger than another, the fastest first. nearest: the plan that lacks
    least memory, where none fits."""

    counts: Counts
    seconds: float
    best: tuple[PlanResult, ...]
    front: tuple[PlanResult, ...] = ()
    nearest: PlanResult | None = None

    @property
    def searched(self) -> int:
        return self.counts.searched

    @property
    def feasible(self) -> int:
        return self.counts.feasible


@dataclass(slots=True)
class _Pool:
    """Plans that are kept while meshes go by: seconds, bytes, mesh, place in its arrays."""

    by: int  # 0: seconds first, 1: bytes first
    rows: Array = field(default_factory=lambda: np.empty((0, 4)))
    front: Array = field(default_factory=lambda: np.empty((0, 4)))
    nearest: tuple[float, float, int, int] | None = None

    @property
    def worst(self) -> float:
        """What a plan has to be under to be kept."""
        return float(self.rows[_KEPT - 1, self.by]) if len(self.rows) >= _KEPT else np.inf

    def beats(self, seconds: float, memory: float) -> bool:
        """Whether plans with these bounds can be neither among the best nor on the front."""
        front = self.front
        under = (front[:, 0] <= seconds) & (front[:, 1] <= memory)
        return bool(under.any()) and (seconds, memory)[self.by] >= self.worst

    def add(self, index: int, got: Screened) -> int:
        """Takes what is worth keeping of one mesh; how many plans of it fit."""
        step, memory, fits = np.broadcast_arrays(got.step, got.memory, got.fits)
        flat, bytes_, fit = step.ravel(), memory.ravel(), fits.ravel()
        places = np.flatnonzero(fit)
        if not len(places):
            return 0
        seconds, sizes = flat[places], bytes_[places]
        near = np.flatnonzero((seconds, sizes)[self.by] <= self.worst)
        if len(near) > 4 * _KEPT:
            order = np.lexsort((sizes[near], seconds[near]) if self.by == 0 else (seconds[near], sizes[near]))
            near = near[order[: 4 * _KEPT]]
        rows = np.stack([seconds, sizes, np.full(len(places), float(index)), places.astype(float)], axis=1)
        merged = np.concatenate([self.rows, rows[near]])
        order = np.lexsort((merged[:, 3], merged[:, 2], merged[:, 1 - self.by], merged[:, self.by]))
        self.rows = _unlike(merged[order])[:_KEPT]
        self.front = _undominated(np.concatenate([self.front, _undominated(rows)]))
        return len(places)

    def remember_nearest(self, index: int, got: Screened, exists: Array) -> None:
        """The plan that needs least memory, while none fits."""
        memory = np.where(np.broadcast_to(exists, got.step.shape), got.memory, np.inf)
        place = int(np.argmin(memory))
        candidate = (float(memory.ravel()[place]), float(got.step.ravel()[place]), index, place)
        self.nearest = candidate if self.nearest is None else min(self.nearest, candidate)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Timetables are millions of small tuples without cycles, which the collector of cycles would go through again and
    again: a fifth of a search on a thousand devices."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def search(space: Space, top: int = 4, objective: str = "time") -> Ranking:
    """The `top` best plans by seconds of a step, or by memory of the fullest rank, and the front."""
    begun = perf_counter()
    least, priced_at = pricer(space)
    bounds = [(*least(mesh), mesh) for mesh in meshes(space)]
    bounds.sort(key=lambda bound: bound[0])
    pool, sure = _Pool(0 if objective == "time" else 1), _Pool(0)
    too_large = dominated = priced = feasible = 0
    for index, (seconds, memory, mesh) in enumerate(bounds):
        if memory * (1.0 + MARGIN) > space.cluster.device.room:
            too_large += mesh.count
        elif space.all_keys and pool.beats(seconds, memory):
            dominated += mesh.count
        else:
            got = priced_at(mesh)
            priced += mesh.count
            feasible += pool.add(index, got)
            if not pool.by:
                sure.add(index, replace(got, fits=got.fits & _tried(space, mesh)))
            if not feasible:
                pool.remember_nearest(index, got, exists(mesh, space))
    every = [mesh for _, _, mesh in bounds]
    if not feasible and pool.nearest is None and bounds:  # to say by how much the least of them is too large
        index = min(range(len(bounds)), key=lambda i: bounds[i][1])
        pool.remember_nearest(index, priced_at(every[index]), exists(every[index], space))
    counts = Counts(sum(mesh.count for mesh in every), too_large, dominated, priced, feasible)
    return _played(space, every, (pool, sure), counts, top, begun)


def candidates(space: Space) -> list[tuple[Plan, int]]:
    """Return (plan, its micro-batch) of every legal plan on all devices."""
    return [candidate for mesh in meshes(space) for candidate in plans(mesh, space.model.n_layer)]


def on_fewer(space: Space, ranking: Ranking, objective: str = "time") -> Ranking:
    """Extend the front to a half, a quarter … of the nodes: by time, memory and device-seconds."""
    answers, counts, seconds = list(ranking.front), ranking.counts, ranking.seconds
    devices = space.cluster.devices
    while devices % 2 == 0 and devices > space.cluster.node:
        devices //= 2
        fewer = replace(space.cluster, devices=devices)
        other = search(replace(space, cluster=fewer), 1, objective)
        answers += other.front
        seconds += other.seconds
        counts = Counts(*(a + b for a, b in zip(astuple(counts), astuple(other.counts), strict=True)))
    points = [(a.price.step, a.verdict.memory.total, a.price.step * a.request.plan.world) for a in answers]

    def beaten(point: tuple[float, ...]) -> bool:
        return any(p != point and all(x <= y for x, y in zip(p, point, strict=True)) for p in points)

    kept = [a for a, point in zip(answers, points, strict=True) if not beaten(point)]
    kept.sort(key=lambda a: (a.price.step, a.verdict.memory.total))
    return replace(ranking, front=tuple(kept), counts=counts, seconds=seconds)


def smallest(space: Space, scaled: Callable[[int], Cluster]) -> tuple[Cluster, PlanResult] | None:
    """Return the first of 1, 2, 4 … nodes on which a plan fits, and its fastest plan. scaled(nodes): makes the
    cluster."""
    nodes = 1
    while nodes <= _MOST_NODES:
        larger = scaled(nodes)
        if larger.devices > space.cluster.devices:
            ranking = search(replace(space, cluster=larger, held=replace(space.held, dp=-1)), top=1)
            if ranking.best:
                return larger, ranking.best[0]
        nodes *= 2
    return None


def answer_at(space: Space, mesh: MeshSizes, place: int) -> PlanResult:
    """The answer of the plan at a place in the mesh's flat arrays."""
    plan, size = plan_at(mesh, np.unravel_index(place, mesh.axes.shape))  # type: ignore[arg-type]
    return simulate(request_at(space, plan, size))


def request_at(space: Space, plan: Plan, micro_batch: int) -> PlanRequest:
    """What is asked of one plan of a space."""
    sizes = micro_batch, plan.micros or 1, space.steps
    how = {"assumed": space.assumed, "unplayed": space.unplayed, "by_sample": space.by_sample}
    return PlanRequest(space.model, plan, space.cluster, space.stack, *sizes, **how)


def exists(mesh: MeshSizes, space: Space) -> Array:
    """Where the arrays of a mesh hold a plan, by schedule and micro-batches."""
    return mesh.axes.served(mesh.plan.pp, space.model.n_layer)[None, None, :, None, :]


def pricer(
    space: Space,
) -> tuple[Callable[[MeshSizes], tuple[float, float]], Callable[[MeshSizes], Screened]]:
    """(what plans of a mesh take at least, seconds and bytes; what each of them takes)."""
    model = attending(space.model)
    # Arrays are of plans whose blocks are all alike, of which nothing is put away, and of gradients of whole batches.
    alike = is_uniform(space.held) and space.held.offload == "none" and not space.by_sample
    if model is not None and alike:
        bench = SearchShared(model, space.cluster, space.stack)
        return (
            lambda mesh: (
                least_seconds(bench, mesh.plan, mesh.axes),
                least_memory(bench, mesh.plan, mesh.axes),
            ),
            lambda mesh: screen(bench, mesh.plan, mesh.axes),
        )
    return lambda mesh: (0.0, 0.0), lambda mesh: _one_by_one(space, mesh)


def _one_by_one(space: Space, mesh: MeshSizes) -> Screened:
    """Price a mesh plan by plan: networks of parts and offloading have no arrays."""
    step, memory = np.full(mesh.axes.shape, np.inf), np.full(mesh.axes.shape, np.inf)
    fits = np.zeros(mesh.axes.shape, bool)
    for at in places(mesh, space.model.n_layer):
        plan, size = plan_at(mesh, at)
        ask = request_at(space, plan, size)
        fit, step[at] = verdict(ask), closed(ask).step
        memory[at], fits[at] = fit.memory.total, fit.is_safe
    return Screened(step, memory, fits)


def _tried(space: Space, mesh: MeshSizes) -> Array:
    """Return which plans of a mesh use only techniques that their stack was fitted to, or that are held."""
    held, axes = {*untried(space.held, space.stack)}, mesh.axes
    tried = [
        [
            held.issuperset(untried(like(mesh.plan, zero=zero, schedule=name), space.stack))
            for name in axes.schedules
        ]
        for zero in axes.zeros
    ]
    return np.array(tried)[:, None, None, None, :]


def _played(
    space: Space, every: list[MeshSizes], pools: tuple[_Pool, _Pool], counts: Counts, top: int, begun: float
) -> Ranking:
    """The best of the screen by event simulation, and so put in order. pools: of all plans, and of the surer ones."""
    (pool, sure), answers = pools, dict[tuple[int, int], PlanResult]()

    def answer(row: Mapping[int, float] | Any) -> PlanResult:
        key = int(row[2]), int(row[3])
        if key not in answers:
            answers[key] = answer_at(space, every[key[0]], key[1])
        return answers[key]

    budget = _ACTIONS if space.all_keys else _ACTIONS // 4
    chosen = _within(map(answer, pool.rows[: max(top, _PLAYED)]), budget, max(top, 8))
    surer = _within(map(answer, sure.rows[:_SURER]), budget // 4, 4)
    keys: Mapping[str, Callable[[PlanResult], tuple[float, ...]]] = {
        # Of plans that take equally long, one that computes nothing twice: it needs memory that is there.
        "time": lambda result: (
            result.price.step, result.request.plan.recompute != "none", result.verdict.memory.total
        ),
        "memory": lambda result: (result.verdict.memory.total, result.price.step),
    }  # fmt: skip
    known = [result.request for result in chosen]
    besides = [result for result in map(simulate, _besides(space)) if result.verdict.is_safe]
    chosen += [result for result in besides if result.request not in known]
    if not pool.by:
        both = [*_better(space, chosen, top, keys["time"]), *_better(space, surer, top, keys["time"])]
        chosen = [*{result.request.plan: result for result in both}.values()]
    chosen.sort(key=keys["memory" if pool.by else "time"])
    front = [answer(row) for row in _spaced(pool.front)]
    near = answer(pool.nearest) if pool.nearest is not None and not chosen else None
    best = (
        chosen
        if pool.by
        else simplest(chosen, min((result.price.step for result in besides), default=np.inf))
    )
    return Ranking(
        replace(counts, played=len(chosen)),
        perf_counter() - begun,
        tuple(best[:top]),
        tuple(_best_of(front + chosen[:1])),
        near,
    )


def _better(
    space: Space, answers: Sequence[PlanResult], top: int, key: Callable[[PlanResult], tuple[float, ...]]
) -> list[PlanResult]:
    """The answers with what single plans are looked at for: blocks played in several ways, and tp in chunks."""
    ordered = sorted(answers, key=key)
    ordered = sorted([*ordered, *_between(space, ordered)], key=key)
    cut = {id(answer) for answer in [answer for answer in ordered if answer.request.plan.tp > 1][:top]}
    return [in_chunks(space, answer) if id(answer) in cut else answer for answer in ordered]


def _within(answers: Iterator[PlanResult], budget: int, least: int) -> list[PlanResult]:
    """Answers, until timetables that nobody had played have so many actions together; `least` of them in any case."""
    taken = list[PlanResult]()
    while budget >= 0 or len(taken) < least:
        before, got = span.cache_info().misses, next(answers, None)
        if got is None:
            break
        taken.append(got)
        plan = got.request.plan
        if span.cache_info().misses > before:
            micros = min(got.request.micros, 7 * plan.pp)
            budget -= actions(plan.schedule, plan.pp, micros)
    return taken


def in_chunks(space: Space, answer: PlanResult) -> PlanResult:
    """Return the plan with tp's products in as few chunks as are about as fast, unless the user says how many."""
    if not overlaps(space, answer.request.plan):
        return answer
    best = answer if answer.request.plan.chunks == CHUNKS[0] else None
    for count in CHUNKS:
        cut = chunked(answer.request.plan, count)
        tried = answer if count == answer.request.plan.chunks else simulate(replace(answer.request, plan=cut))
        if space.legal(cut) and (best is None or gain(tried, best) > _WORTH) and tried.verdict.is_safe:
            best = tried
    return best or answer


def _between(space: Space, chosen: Sequence[PlanResult]) -> list[PlanResult]:
    """Return variants of the best plans that play some blocks faster, where they save enough to be worth a longer
    name."""
    under = chosen[0].price.step * (1.0 - _WORTH) if chosen else 0.0
    requests = [
        ask
        for answer in chosen[:_MIXED]
        for ask in between(answer.request, space.held.said, answer.price.step - under)
    ]
    answers = [simulate(ask) for ask in requests if space.legal(ask.plan)]
    return [answer for answer in answers if gain(answer, chosen[0]) > _WORTH]


def _besides(space: Space) -> list[PlanRequest]:
    """The user's own plans, where they are of as many devices and samples as are searched."""
    requests = [request_at(space, *pair) for pair in space.besides(space.cluster.devices)]
    return [ask for ask in requests if ask.batch == space.batch]


def _unlike(rows: Array) -> Array:
    """Without rows that cost what the one before costs: a key that changes nothing here is left as it is."""
    apart = np.abs(np.diff(rows[:, :2], axis=0)) > 1e-12 * np.abs(rows[1:, :2])
    return rows[np.concatenate([[True], apart.any(axis=1)])]


def _undominated(rows: Array) -> Array:
    """Return the rows of which none is slower and larger than another, by seconds."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    least = np.minimum.accumulate(rows[:, 1])
    better = np.concatenate([[True], rows[1:, 1] < least[:-1]]) if len(rows) else np.zeros(0, bool)
    return rows[better]


def _spaced(rows: Array) -> Array:
    """At most so many of the front, spaced over it, with both ends."""
    if len(rows) <= _FRONT:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, _FRONT).round().astype(int))]


def _best_of(answers: list[PlanResult]) -> list[PlanResult]:
    """Those that none of the others beats, by seconds."""
    kept: list[PlanResult] = []
    for answer in sorted(answers, key=lambda a: (a.price.step, a.verdict.memory.total)):
        if not kept or answer.verdict.memory.total < kept[-1].verdict.memory.total:
            kept.append(answer)
    return kept

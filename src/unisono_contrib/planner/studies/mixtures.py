"""A plan, and all plans, on devices of several kinds: every placement is priced, and each pool alone beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from unisono.planner import explanation, search
from unisono.planner.formatting import Column, Description, Row, figure, figures, gibibytes, lines, table
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import MemoryVerdict, squeezed
from unisono.planner.pricing import verdict
from unisono.planner.search import Counts, Ranking
from unisono.planner.simulate import GIB, PlanRequest, PlanResult, closed, simulate
from unisono.planner.space import MeshSizes, Space, meshes, plan_at
from unisono.spec.errors import UsageError
from unisono.spec.words import seconds
from unisono_contrib.planner.heterogeneous import cut, memory_of_row, tightest
from unisono_contrib.planner.mixture import Mixture, Placement, placements

_PRICED = 300  # plans at most, in all their placements
_SURE = 1.2  # by how much the order may overrate a plan beside the first ones that fit
_SPARED = 0.8  # of the fullest rank's memory, where an uneven cut and later rows need less
_ALIKE = 0.01  # steps that are apart by less are as good as equal
_POOLS = (
    Column("pool", "pool"), Column("device", "device"), Column("rows", "rows"), Column("replicas", "replicas"),
    Column("blocks", "layers", lambda blocks: " ".join(f"{n:g}" for n in blocks)),
    Column("memory", "mem_gib", gibibytes), Column("of", "capacity_gib", gibibytes),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlacedAnswer:
    """A plan that lies somewhere. answer: of the pool that sets the pace, where they are replicas."""

    mixture: Mixture
    where: Placement
    answer: PlanResult

    @property
    def said(self) -> str:
        return self.mixture.said(self.where)

    @property
    def pools(self) -> list[Row]:
        """What each pool has."""
        table, begun, stages = list[Row](), 0, self.answer.stages
        for pool, count in self.where.pools:
            cluster, rows = self.mixture.pools[pool], range(len(stages))
            if self.where.kind == "rows":
                rows = range(begun, begun + count)
                begun += count
            fullest = max(self._memory(row) for row in rows)
            table.append({
                "pool": cluster.name, "device": cluster.device.name, self.where.kind: count,
                "layers": [stages[row] for row in rows], "mem_gib": fullest / GIB,
                "capacity_gib": cluster.device.room / GIB, "fits": fullest <= cluster.device.room,
            })  # fmt: skip
        return table

    def _memory(self, row: int) -> float:
        """Bytes of a rank of a row."""
        ask = replace(self.answer.request, plan=self.answer.played)
        need = memory_of_row(ask, self.answer.stages, row)
        return squeezed(need, ask.cluster.of_row(row).device.room).total


def everywhere(mixture: Mixture, ask: PlanRequest) -> list[PlacedAnswer]:
    """The plan in every placement: those that fit first, the quickest first. Of the request all but the cluster is
    read. Raises UsageError where there is no place."""
    placed = [
        PlacedAnswer(mixture, where, _answer(mixture, ask, where)) for where in placements(mixture, ask.plan)
    ]
    if not placed:
        raise _nowhere(mixture, ask)
    return sorted(placed, key=lambda answer: (answer.answer.verdict.short, answer.answer.price.step))


def _requests(mixture: Mixture, ask: PlanRequest, where: Placement) -> list[PlanRequest]:
    """The plan where it lies, with the cut that suits its rows; of replicas for each kind of device."""
    each = [replace(ask, cluster=cluster) for cluster in mixture.clusters(where)]
    if where.kind != "rows":
        return each
    return [replace(each[0], plan=cut(each[0]))]


def _answer(mixture: Mixture, ask: PlanRequest, where: Placement) -> PlanResult:
    answers = [simulate(request) for request in _requests(mixture, ask, where)]
    slowest = max(answers, key=lambda request: request.price.step)
    return replace(slowest, verdict=tightest([request.verdict for request in answers]))


@dataclass(frozen=True, slots=True)
class _Guess:
    """A plan where it is best by closed forms, which say no more than what is played."""

    ask: PlanRequest
    where: Placement
    step: float
    verdict: MemoryVerdict


def _guesses(mixture: Mixture, ask: PlanRequest) -> list[_Guess]:
    """One for each place."""
    guesses: list[_Guess] = []
    for where in placements(mixture, ask.plan):
        each = _requests(mixture, ask, where)
        step = max(closed(request).step for request in each)
        guesses.append(_Guess(ask, where, step, tightest([verdict(request) for request in each])))
    return guesses


def _played(mixture: Mixture, guesses: Sequence[_Guess], top: int) -> list[PlacedAnswer]:
    """The quickest of them, played, each plan in its best place: no others than those whose closed form could still be
    among the first."""
    best: dict[tuple[str, int], PlacedAnswer] = {}
    ordered: list[PlacedAnswer] = []
    for guess in sorted(guesses, key=lambda guess: guess.step):
        if len(ordered) >= top and guess.step > ordered[top - 1].answer.price.step:
            break
        placed = PlacedAnswer(mixture, guess.where, _answer(mixture, guess.ask, guess.where))
        key = str(guess.ask.plan), guess.ask.micro_batch
        if key not in best or placed.answer.price.step < best[key].answer.price.step:
            best[key] = placed
        ordered = sorted(
            best.values(), key=lambda guess: (guess.answer.price.step, guess.answer.verdict.memory.total)
        )
    return ordered


def _nowhere(mixture: Mixture, ask: PlanRequest) -> UsageError:
    """Why a plan cannot be laid on the pools, and what could be."""
    plan = ask.plan
    row = plan.world // plan.pp
    sizes = " and ".join(f"{pool.devices} ({pool.name})" for pool in mixture.pools)
    whole = sum(pool.devices // row for pool in mixture.pools)
    what = f"a row of the pipeline takes {row} devices and there are {plan.pp} rows; the pools have {sizes}"
    if plan.dp > 1:
        what += f"; a replica takes {plan.inner} devices, and there are {plan.dp}"
    best = f"pp={whole} with rows of {row}" if whole else "smaller dp, shard or tp, and a greater pp"
    fix = f"a row is dp*shard*cp*tp devices of one pool: {best}"
    return UsageError(what, where=f"{plan} on {mixture.name}", fix=fix, code="P14")


def describe(placed: Sequence[PlacedAnswer]) -> Description:
    """Where a plan lies: the best of all its placements, and the others."""
    first, mixture, join = placed[0], placed[0].mixture, placed[0].mixture.join
    source, pools = join.sources.get("bandwidth", ""), first.pools
    placement = {
        "kind": first.where.kind, "said": first.said, "pools": pools,
        "join": {
            "name": join.name, "bandwidth_gb_s": join.bandwidth / 1e9, "latency_us": join.latency * 1e6,
            "source": str(source),
        },
    }  # fmt: skip
    others = [
        {"said": other.said, "step_s": other.answer.price.step, "fits": other.answer.verdict.fits}
        for other in placed
    ]
    by = f"{join.name}, {join.bandwidth / 1e9:g} GB/s a device ({source or 'given'})"
    head = [("placement", f"{first.said}; joined by {by}")]
    head += [
        ("otherwise", f"{other['said']}: {figure(other['step_s'])} s{'' if other['fits'] else ', too large'}")
        for other in others[1:5]
    ]
    unused = [pool.name for pool in mixture.pools if pool.name not in {row["pool"] for row in pools}]
    head += [("", f"nothing lies on {' and '.join(unused)}")] if unused else []
    columns = [column for column in _POOLS if column.key in pools[0]]
    facts = {"placement": placement, "placements": others}
    return facts, "\n".join([*table(columns, pools), *lines(head)])


# --- the best plans --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MixedRanking:
    """ranking: the best plans in their best places. placed: the same, with where they lie. alone: the best answer of
    each pool without the others, None where none fits. nearest: what lacks least, where nothing fits."""

    ranking: Ranking
    placed: tuple[PlacedAnswer, ...]
    alone: tuple[tuple[Cluster, PlanResult | None], ...]
    nearest: PlacedAnswer | None


def find(base: Space, mixture: Mixture, top: int = 4) -> MixedRanking:
    """The `top` best plans over all pools, and each pool alone. Of base everything but the cluster is read.

    Plans are put in order by what the screen says of them on each pool, as if all devices were of that kind; the first
    some hundred are priced.
    """
    begun = perf_counter()
    whole = replace(base, cluster=mixture.whole())
    order, searched = _order(whole, mixture)
    tried, fitting, least = list[_Guess](), list[_Guess](), np.inf
    priced = several = 0
    for guess, mesh, flat in order:
        if guess > _SURE * least:
            break
        plan, micro_batch = plan_at(mesh, np.unravel_index(flat, mesh.axes.shape))  # type: ignore[arg-type]
        guesses = _guesses(mixture, search.request_at(whole, plan, micro_batch))
        safe = [result for result in guesses if result.verdict.is_safe]
        tried, fitting = tried + guesses, fitting + safe
        priced, several = priced + 1, several + bool(safe)
        least = guess if several == top and safe else least
    played = _played(mixture, fitting, top)
    best = tuple(played[:top])
    counts = Counts(searched=searched, priced=priced, feasible=several, played=len(played))
    alone = [(pool, search.search(replace(base, cluster=pool), top=1).best) for pool in mixture.pools]
    ranking = Ranking(counts, perf_counter() - begun, tuple(result.answer for result in best))
    nearest = None
    if tried and not best:
        least_short = min(tried, key=lambda result: result.verdict.short)
        nearest = PlacedAnswer(
            mixture, least_short.where, _answer(mixture, least_short.ask, least_short.where)
        )
    return MixedRanking(
        ranking, best, tuple((pool, answers[0] if answers else None) for pool, answers in alone), nearest
    )


def _order(whole: Space, mixture: Mixture) -> tuple[list[tuple[float, MeshSizes, int]], int]:
    """(seconds, mesh, place in its arrays) of the most promising plans, and how many there are. On rows of two kinds a
    step takes about the harmonic mean of what it takes on each, by their devices, and has their memory together."""
    seen = [mixture.seen_from(pool) for pool in range(len(mixture.pools))]
    pricers = [search.pricer(replace(whole, cluster=cluster))[1] for cluster in seen]
    parts = [pool.devices / mixture.devices for pool in mixture.pools]
    room = sum(part * pool.device.room for part, pool in zip(parts, mixture.pools, strict=True))
    least = min(pool.device.room for pool in mixture.pools)
    kept: list[tuple[float, int, int]] = []
    every, searched = list[MeshSizes](), 0
    for mesh in meshes(whole):
        kinds = {placement.kind for placement in placements(mixture, mesh.plan)}
        if not kinds:
            continue
        searched += mesh.count
        each = [placement(mesh) for placement in pricers]
        steps = [np.broadcast_to(placement.step, mesh.axes.shape) for placement in each]
        memory = np.broadcast_to(each[0].memory, mesh.axes.shape)
        rows = 1.0 / sum(part / step for part, step in zip(parts, steps, strict=True))
        guess = np.where(_SPARED * memory <= room, rows, np.inf) if "rows" in kinds else np.inf
        if "replicas" in kinds:
            guess = np.minimum(guess, np.where(memory <= least, np.max(steps, axis=0), np.inf))
        exists = np.broadcast_to(search.exists(mesh, whole), mesh.axes.shape)
        flat = np.where(exists, guess, np.inf).ravel()
        near = np.argsort(flat, kind="stable")[:_PRICED]
        kept += [(float(flat[at]), len(every), int(at)) for at in near if np.isfinite(flat[at])]
        every.append(mesh)
    kept.sort()
    return [(guess, every[mesh], at) for guess, mesh, at in kept[:_PRICED]], searched


def pays(mixed: MixedRanking) -> str:
    """Whether the pools together are worth it, in one sentence."""
    fitting = [(pool, answer) for pool, answer in mixed.alone if answer is not None]
    if not mixed.placed:
        names = " and ".join(pool.name for pool, _ in fitting)
        return f"mixing is no use: no plan splits this batch over all pools and fits; {names} alone will do"
    if not fitting:
        return "mixing is needed: no pool alone has a plan that splits this batch and fits"
    first, alone_answer = min(fitting, key=lambda pair: pair[1].price.step)
    gain = alone_answer.price.step / mixed.placed[0].answer.price.step
    if gain < 1.0 - _ALIKE:
        return f"mixing costs: {first.name} alone is {1 / gain:.2f} times as fast as all together; leave the others out"
    if gain < 1.0 + _ALIKE:
        return f"mixing changes nothing: {first.name} alone is as fast as all pools together; leave the others out"
    devices = sum(pool.devices for pool, _ in mixed.alone) / first.devices
    alone = f"{first.name} alone, with {devices:.3g} times its devices"
    return f"mixing pays: all together are {gain:.2f} times as fast as {alone}"


def describe_best(mixed: MixedRanking) -> Description:
    """What `plan` says: the best plans as on one cluster, where each lies, and each pool alone."""
    alone, said = list[Row](), pays(mixed)
    text = ["each pool alone"]
    for pool, answer in mixed.alone:
        row = {"pool": pool.name, "devices": pool.devices, "fits": answer is not None}
        alone.append(
            {**dict.fromkeys(("step_s", "plan", "micro_batch")), **row, **(figures(answer) if answer else {})}
        )
        best = "no plan splits this batch over it and fits"
        text.append(
            f"  {pool.name}: {f'{seconds(answer.price.step)}  {answer.request.plan}' if answer else best}"
        )
    places = [describe([answer]) for answer in mixed.placed]
    facts, page = explanation.describe(mixed.ranking, places[0][1].replace("\n", "\n   ") if places else "")
    for row, (place_facts, _) in zip(facts["plans"], places, strict=True):
        row["placement"] = place_facts["placement"]
    page = "\n".join([*([page, ""] if page else []), *text, "", said])
    return {**facts, "alone": alone, "mixing": said}, page

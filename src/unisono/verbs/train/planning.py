"""Which plan a run is played under: the one that `plan = "auto"` chooses, and a better one for a run under way. No
torch.

The planner ranks all plans by price. Where ranks share the cores of this host, prices are rough, and for `auto` the
best plan of each of a few meshes is played for a second on made-up data: the quickest is chosen. Under way, the price
of staying stands beside that of another plan and of the move.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from unisono.comm.members import Members, Shape, assign
from unisono.config import Loaded, Recipe
from unisono.launch.background_replanner import Advice, Situation
from unisono.launch.run.membership import RunSpread
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.plan.grammar import member
from unisono.planner import predict, search
from unisono.planner.explanation import why
from unisono.planner.formatting import room
from unisono.planner.from_recipe import serving
from unisono.planner.machines.cluster import Cluster, Link
from unisono.planner.pricing import closed
from unisono.planner.request import PlanRequest
from unisono.planner.simulate import PlanResult
from unisono.planner.space import space_on
from unisono.spec import words
from unisono.spec.errors import Infeasible, UnisonoError, UsageError
from unisono.spec.model import Facts
from unisono.verbs._sizes import model_of
from unisono.verbs.train.spreading import dealt, spread_of

Play = Callable[[Loaded, Sequence[PlanResult]], list[float]]
"""Seconds of a step of each plan, played on this machine (`measure.check.played`)."""
PLAYED = 4
"""Meshes of which the best plan is played."""
_LOOKED_AT = 64  # best plans by price among which those meshes are looked for
_BYTES = 256  # words, where only the data knows how many: characters, most likely


def choose(
    loaded: Loaded, ranks: int | None, environ: Mapping[str, str], play: Play | None = None
) -> tuple[Loaded, list[str]]:
    """(the recipe with the best plan, what was chosen and why). The keys that stand beside `auto` are held.

    ranks: that exist already; else the recipe's, else one for each device or core. play: measures plans where prices
    are rough; None: prices alone decide. Raises UsageError, Infeasible.
    """
    cluster, stack, is_calibrated = predict.here(environ)
    if not is_calibrated:
        raise UsageError(
            "plan auto needs this machine in numbers, and nobody has measured it",
            where="plan",
            fix="unisono calibrate, which takes half a minute, once",
            code="P19",
        )
    cluster = predict.of_ranks(cluster, ranks or loaded.recipe.launch.ranks or cluster.devices)
    held = replace(loaded.plan, said=loaded.plan.said - {"auto"})
    known = sized(loaded)
    ranking = search.search(space_on(known, model_of(known, environ), held, cluster, stack), top=_LOOKED_AT)
    if not ranking.best:
        raise _none(loaded, ranking, cluster)
    model = loaded.recipe.model
    if play is not None and cluster.cores and model.played and model.attends:
        return _measured(known, loaded, best_of_meshes(ranking.best), play)
    best = ranking.best[0]
    plan = replace(best.request.plan, said=frozenset())
    lines = [
        f"plan auto  {plan}: {words.seconds(best.price.step)} a step, {best.trusted}",
        f"           the best of {ranking.feasible} that fit on {cluster.devices} ranks; {why(best, best)}",
    ]
    for other in ranking.best[1:3]:
        lines.append(f"           not {other.request.plan}: {why(other, best)}")
    return replace(loaded, plan=plan), lines


def best_of_meshes(answers: Sequence[PlanResult]) -> list[PlanResult]:
    """The best plan of each mesh, of as many meshes as are played. answers: the best first."""
    best: dict[tuple[int, ...], PlanResult] = {}
    for answer in answers:
        plan = answer.request.plan
        best.setdefault((plan.dp, plan.shard, plan.cp, plan.tp, plan.pp), answer)
    return list(best.values())[:PLAYED]


def _measured(
    known: Loaded, loaded: Loaded, answers: Sequence[PlanResult], play: Play
) -> tuple[Loaded, list[str]]:
    """The quickest plan as played. known: the recipe with a vocabulary, by which plans are played."""
    took = dict(zip((str(answer.request.plan) for answer in answers), play(known, answers), strict=True))
    best = min(answers, key=lambda answer: took[str(answer.request.plan)])
    quickest = took[str(best.request.plan)]
    lines = [
        f"plan auto  {best.request.plan}: {words.seconds(quickest)} a step, the quickest of those played here"
    ]
    for text, seconds in took.items():
        if text != str(best.request.plan):
            slower = words.percent(seconds / quickest - 1.0)
            lines.append(f"           not {text}: {words.seconds(seconds)} a step, {slower} slower")
    return replace(loaded, plan=replace(best.request.plan, said=frozenset())), lines


def sized(loaded: Loaded) -> Loaded:
    """The vocabulary is the data's where nobody has said it; for a price a near number will do."""
    recipe = loaded.recipe
    if recipe.model.sized(Facts()).vocab is not None or not recipe.model.attends:
        return loaded
    return replace(
        loaded, recipe=recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab": _BYTES})})
    )


def _none(loaded: Loaded, ranking: search.Ranking, cluster: Cluster) -> Infeasible:
    if ranking.nearest is None:
        return Infeasible(
            f"no plan splits a batch of {loaded.recipe.train.global_batch} over {cluster.devices} ranks",
            where="plan auto",
            fix="another --train.global_batch, --launch.ranks, or fewer keys beside auto",
        )
    short = ranking.nearest.verdict
    return Infeasible(
        f"no plan fits: the nearest, {ranking.nearest.request.plan}, needs {words.nbytes(short.memory.total)} a rank"
        f" and there are {room(short)}",
        where=f"plan auto on {cluster.devices} ranks",
        fix="a smaller --train.micro_batch, or more memory",
    )


HELD = frozenset({"sync", "codec", "collective", "precision", "zero", "recompute", "offload"})
"""Keys that stay as they are: what they change is no matter of how many ranks there are."""
WORTH = 0.9
"""Of a step's seconds: another plan has to be below."""
UNEVEN = 1.4
"""How many times as long as the quickest replica one has to compute for a leaf to be given fewer."""
LOOKS = 4
"""In how many looks after another, a quarter of a minute apart, it has to be so."""


@dataclass(slots=True)
class Replanner:
    """recipe, plan: resolved, as the run began. environ: where this machine's own prices are found. _slow: the slowest
    replica of each look since the world has changed, as long as it was the same one."""

    recipe: Recipe
    plan: Plan
    environ: Mapping[str, str]
    _slow: list[int] = field(default_factory=list)

    def __call__(self, now: Situation) -> Advice:
        if now.changed:
            self._slow.clear()
            return self._by_price(now)
        return self._by_speed(now)

    def _by_price(self, now: Situation) -> Advice:
        """The planner is asked for the ranks that there are."""
        try:
            best, best_s, stay_s = self._priced(now)
        except UnisonoError as error:
            return Advice(None, f"the planner has no other plan: {error.what}")
        if best is None or best.plan == now.spread.plan:
            return Advice(None, f"the planner stays with {now.spread.plan} on {now.room} ranks")
        # Prices are held to what was measured of the plan that is played.
        takes = now.step_s * best_s / stay_s
        sooner = (now.step_s - takes) * now.left - now.move_s
        said = (
            f"{best.plan} takes {words.seconds(takes)} a step by its price, {now.spread.plan} takes"
            f" {words.seconds(now.step_s)}; with {words.seconds(now.move_s)} for the move and {now.left} steps to come"
        )
        if takes > WORTH * now.step_s or sooner <= now.move_s:
            return Advice(None, f"the planner stays: {said}, not worth it")
        return Advice(replace(best, why=f"{said}, {words.seconds(sooner)} sooner"))

    def _priced(self, now: Situation) -> tuple[RunSpread | None, float, float]:
        """(the best plan on what is there, seconds of its step, and of the present one's). Raises UnisonoError."""
        loaded = sized(Loaded(self.recipe, self.plan, {}))
        model, stay = model_of(loaded, self.environ), Plan.parse(now.spread.plan)
        cluster, stack, _ = predict.here(self.environ)
        request = ask_of(loaded, model, stay, among_hosts(predict.of_ranks(cluster, stay.world), now), stack)
        stay_s = closed(request).step
        held = replace(self.plan, said=self.plan.said & HELD)
        for ranks in range(now.room, stay.world - 1, -1):
            where = among_hosts(predict.of_ranks(cluster, ranks), now)
            space = space_on(loaded, model, held, where, stack)
            least = fidelity_of(stay)
            legal = space.legal
            space = replace(space, legal=lambda plan: legal(plan) and fidelity_of(plan) >= least)  # noqa: B023
            for candidate in search.search(space, top=3).best:
                plan = replace(candidate.request.plan, said=frozenset())
                if (spread := spread_of(self.recipe, replace(plan, micros=None))) is not None:
                    return spread, candidate.price.step, stay_s
        return None, stay_s, stay_s

    def _by_speed(self, now: Situation) -> Advice:
        """Fewer leaves for replicas that turn out slower, where policies can play that."""
        plan = Plan.parse(now.spread.plan)
        speeds = replica_speeds(self.recipe, plan, now)
        policy = member("sync", plan.sync)
        if policy is not None and policy.look_every:  # ranks see to it themselves
            return Advice(None)
        if now.hosts == 1 and not (
            policy and policy.leafwise
        ):  # on one host the same command has the same bits
            return Advice(None)
        if len(speeds) < 2 or max(speeds) < UNEVEN * min(speeds):
            self._slow.clear()
            return Advice(None)
        slow = min(range(len(speeds)), key=speeds.__getitem__)
        self._slow = [*(rank for rank in self._slow if rank == slow), slow]
        if len(self._slow) < LOOKS:
            return Advice(None)
        spread = dealt(self.recipe, plan, speeds)
        if spread is None:
            return Advice(None)
        before = slowest(self.recipe, plan, now.spread.speeds, speeds)
        after = slowest(self.recipe, plan, spread.speeds, speeds)
        if after > WORTH * before:
            return Advice(None)
        said = (
            f"replica {slow} computes {max(speeds) / min(speeds):.1f} times as long as the quickest for a leaf: leaves"
            f" are distributed by speed, {words.percent(1 - after / before)} less to wait for"
        )
        return Advice(replace(spread, why=said))


def best_for(recipe: Recipe, plan: Plan, environ: Mapping[str, str], ranks: int) -> Plan | None:
    """The planner's best for so many ranks, by the keys of the plan that stay; None where it has none."""
    loaded = sized(Loaded(recipe, plan, {}))
    with suppress(UnisonoError):
        cluster, stack, _ = predict.here(environ)
        held = replace(plan, said=plan.said & HELD)
        space = space_on(loaded, model_of(loaded, environ), held, predict.of_ranks(cluster, ranks), stack)
        for candidate in search.search(space, top=1).best:
            return replace(candidate.request.plan, said=frozenset(), micros=None)
    return None


def ask_of(loaded: Loaded, model: object, plan: Plan, cluster: Cluster, stack: object) -> PlanRequest:
    """What a plan takes there."""
    train = loaded.recipe.train
    micro = train.micro_batch or 1
    micros = max(1, train.global_batch // micro // plan.replicas)
    cluster = serving(cluster, loaded.recipe)
    return PlanRequest(model, plan, cluster, stack, micro, micros)  # pyright: ignore[reportArgumentType]


def among_hosts(cluster: Cluster, now: Situation) -> Cluster:
    """The ranks of a cluster on several hosts, with the link between them that was measured."""
    if now.hosts == 1 or not now.rate or not cluster.links or cluster.devices <= now.per_host:
        return cluster
    inner = replace(cluster.links[0], size=now.per_host)
    between = Link("between hosts", cluster.devices, now.rate / 8, max(now.delay, 1e-5))
    return replace(cluster, links=(inner, between), in_node=now.per_host)


def _counts(recipe: Recipe, plan: Plan, speeds: tuple[float, ...]) -> list[int]:
    """Leaves of each replica."""
    leaves = recipe.train.global_batch // (recipe.train.micro_batch or 1)
    shape, policy = Shape(dp=plan.dp, shard=plan.shard), member("sync", plan.sync)
    speeds, branches = speeds or getattr(policy, "replica_speeds", ()), getattr(policy, "leafwise", False)
    dealt = assign(leaves, shape, Members.first(shape.world), speeds or None, branches)
    return [sum(len(dealt[shape.rank({"pp": 0, "dp": at, "shard": s, "cp": 0, "tp": 0})]) for s in range(plan.shard))
            for at in range(plan.dp)]  # fmt: skip


def slowest(recipe: Recipe, plan: Plan, dealt_by: tuple[float, ...], speeds: tuple[float, ...]) -> float:
    """Seconds that the last replica computes, in units of a leaf at speed 1."""
    return max(count / speed for count, speed in zip(_counts(recipe, plan, dealt_by), speeds, strict=True))


def replica_speeds(recipe: Recipe, plan: Plan, now: Situation) -> tuple[float, ...]:
    """Leaves a second that each replica computes, the slowest rank of each; () where some have said nothing."""
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    if len(now.busy) != shape.world or not all(now.busy.values()) or recipe.launch.order:
        return ()
    counts = _counts(recipe, plan, now.spread.speeds)
    longest = [0.0] * plan.dp
    for rank, seconds in now.busy.items():
        at = shape.coordinates(rank)["dp"]
        longest[at] = max(longest[at], seconds)
    return tuple(count / seconds for count, seconds in zip(counts, longest, strict=True))

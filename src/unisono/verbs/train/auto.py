"""`plan = "auto"`: how a run is spread on this machine, chosen and explained. No torch.

The planner ranks all plans by price. Where ranks share the cores of this host, prices are rough, and the best plan of
each of a few meshes is played for a second on made-up data: the quickest is chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unisono.config import Loaded
from unisono.planner import predict, search
from unisono.planner.explanation import why
from unisono.planner.formatting import room
from unisono.planner.machines.cluster import Cluster
from unisono.planner.simulate import PlanResult
from unisono.planner.space import space_on
from unisono.spec import words
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.model import Facts
from unisono.verbs._sizes import model_of

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
            fix="unisono calibrate, which takes about two minutes, once",
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
            f"no plan deals a batch of {loaded.recipe.train.global_batch} to {cluster.devices} ranks",
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

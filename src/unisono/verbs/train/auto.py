"""`plan = "auto"`: the planner chooses how a run is spread on this machine, and says why. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from unisono.config import Loaded
from unisono.planner import chosen, predict, search
from unisono.planner.machines.cluster import Cluster
from unisono.planner.simulate import GIB
from unisono.report import words
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.model import Facts
from unisono.verbs._plan import space_on

_BYTES = 256  # words, where only the data knows how many: characters, most likely


def choose(got: Loaded, ranks: int | None, environ: Mapping[str, str]) -> tuple[Loaded, list[str]]:
    """(the recipe with the best plan, what was chosen and why). The keys that stand beside `auto` are held.

    ranks: that exist already; else the recipe's, else one for each device or core. Raises UsageError, Infeasible.
    """
    where, made, measured = predict.here(environ)
    if not measured:
        raise UsageError(
            "plan auto needs this machine in numbers, and nobody has measured it",
            where="plan",
            fix="unisono calibrate, which takes two minutes, once",
            code="P19",
        )
    where = _with(where, ranks or got.recipe.launch.ranks or where.devices)
    held = replace(got.plan, said=got.plan.said - {"auto"})
    found = search.search(space_on(_sized(got), held, where, made), top=3)
    if not found.best:
        raise _none(got, found, where)
    best = found.best[0]
    plan = replace(best.question.plan, said=frozenset())
    said = [
        f"plan auto  {plan}: {words.seconds(best.price.step)} a step, {best.trusted.removeprefix('a step is ')}",
        f"           the best of {found.feasible} that fit on {where.devices} ranks; {chosen.why(best, best)}",
    ]
    for other in found.best[1:]:
        said.append(f"           not {other.question.plan}: {chosen.why(other, best)}")
    return replace(got, plan=plan), said


def _with(where: Cluster, ranks: int) -> Cluster:
    return replace(predict.roomy(where, ranks), devices=ranks)


def _sized(got: Loaded) -> Loaded:
    """The vocabulary is the data's where nobody has said it; for a price a near number will do."""
    recipe = got.recipe
    if recipe.model.sized(Facts()).vocab is not None or not recipe.model.attends:
        return got
    return replace(
        got, recipe=recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab": _BYTES})})
    )


def _none(got: Loaded, found: search.Ranking, where: Cluster) -> Infeasible:
    if found.nearest is None:
        return Infeasible(
            f"no plan deals a batch of {got.recipe.train.global_batch} to {where.devices} ranks",
            where="plan auto",
            fix="another --train.global_batch, --launch.ranks, or fewer keys beside auto",
        )
    short = found.nearest.verdict
    return Infeasible(
        f"no plan fits: the nearest, {found.nearest.question.plan}, needs {short.memory.total / GIB:.1f} GiB a rank and"
        f" there are {short.capacity / GIB:.1f}",
        where=f"plan auto on {where.devices} ranks",
        fix="a smaller --train.micro_batch, or more memory",
    )

"""`unisono plan --check`: the best plans played for a few steps on this machine, beside their prices. No torch here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.config import Loaded
from unisono.launch.fork_server import ForkServer
from unisono.planner.clusters import names
from unisono.planner.search import Space, search
from unisono.planner.simulate import PlanResult
from unisono.spec.errors import Infeasible, UsageError

ENTRY = "unisono.measure.rank:main"
_SECONDS = 1.0  # of steps, for each plan
_SILENCE = 300.0


def run(got: Loaded, within: Space, top: int) -> tuple[Mapping[str, Any], str]:
    """Return (keys of --json, the page): each of the `top` plans, priced and measured, and what following the prices
    costs.

    Tokens are made up, which changes no time. Raises UsageError for a model that this cannot play, Infeasible where
    nothing fits, and what a rank raises.
    """
    kind = got.recipe.model
    if not (kind.played and kind.attends):
        raise UsageError(
            f"--check plays transformers that train can play, not kind {kind.kind}", where="unisono plan",
            fix="without --check", code="C22",
        )  # fmt: skip
    ranking = search(within, top)
    if not ranking.best:
        raise Infeasible(
            "no plan fits", where=within.cluster.name, fix="unisono plan without --check says more"
        )
    rows = list(zip(ranking.best, played(got, ranking.best), strict=True))
    return _facts(rows), _page(rows)


def played(got: Loaded, answers: Sequence[PlanResult]) -> list[float]:
    """Seconds of the median step of each plan on this machine, played one after the other for a second each."""
    with ForkServer(ENTRY) as nursery:
        return [_seconds(nursery, got, answer) for answer in answers]


def played_here(within: Space) -> None:
    """Raises UsageError where the cluster is plainly another machine: its plans would take hours here."""
    named = within.cluster.name.partition(":")[0]
    if named in names() and within.cluster.device.name != "cpu":
        raise UsageError(
            f"--check plays the best plans here, and {named} is another machine", where="--check, --cluster",
            fix="unisono calibrate, once, and --check without --cluster", code="C04",
        )  # fmt: skip


def _seconds(nursery: ForkServer, got: Loaded, answer: PlanResult) -> float:
    """The median step of a plan here."""
    plan, ask = answer.request.plan, answer.request
    recipe = got.recipe
    train = recipe.train.model_copy(update={"micro_batch": ask.micro_batch})
    argument = {
        "ask": "plan",
        "recipe": recipe.model_copy(update={"train": train}).model_dump_json(exclude_unset=True),
        "plan": str(replace(plan, said=frozenset())),
        "seconds": _SECONDS,
    }  # fmt: skip
    threads = max(1, len(os.sched_getaffinity(0)) // plan.world)
    results = nursery.run(argument, plan.world, threads, timeout=_SILENCE).returned()
    return max(result["step"] for result in results)


def _facts(rows: list[tuple[PlanResult, float]]) -> Mapping[str, Any]:
    best = min(seconds for _, seconds in rows)
    return {
        "check": [
            {
                "plan": str(answer.request.plan), "step_s": answer.price.step, "measured_s": seconds,
                "error_pct": 100.0 * (answer.price.step / seconds - 1.0),
            }
            for answer, seconds in rows
        ],
        "regret_pct": 100.0 * (rows[0][1] / best - 1.0),
    }  # fmt: skip


def _page(rows: list[tuple[PlanResult, float]]) -> str:
    facts = _facts(rows)
    wide = max(len(row["plan"]) for row in facts["check"])
    lines = [f"{'plan':<{wide}}  {'priced':>10}  {'measured':>10}  {'error':>8}"]
    for row in facts["check"]:
        lines.append(
            f"{row['plan']:<{wide}}  {1e3 * row['step_s']:>7.1f} ms  {1e3 * row['measured_s']:>7.1f} ms"
            f"  {row['error_pct']:>+6.1f} %"
        )
    regret = facts["regret_pct"]
    said = "which was the fastest of these" if regret <= 0.0 else f"{regret:.1f} % above the fastest of these"
    return "\n".join([*lines, "", f"the prices would have chosen {facts['check'][0]['plan']}, {said}"])

"""Whether the plan that `plan=auto` chooses is the best: every plan of a space, played here, in six cases.

    python benchmarks/auto_truth.py                        calibrates before each case; about an hour
    python benchmarks/auto_truth.py --cluster FILE.toml --cases 0 1

Every plan that `train` plays on so many ranks is played once, for a few steps. Those within a third of the quickest,
and the chosen one, are played again in turns, longer: this names the quickest. The least of many noisy medians is too
low by the noise, so how much longer the chosen one takes comes from turns of these two alone. Plans that are the same
program (GPipe and 1F1B of one micro-batch) are one. Exit 1 where it is more than 5 % in one of the cases.

A machine that others share changes within an hour: how late ranks wake up to twice, and with it which plan is quickest.
"""

import argparse
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lab
from cpu_truth import MODELS, between, calibrated, played

from unisono.config import Loaded, Recipe
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan
from unisono.planner import search
from unisono.planner.clusters import cluster
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.space import space_on
from unisono.planner.stack import stack
from unisono.programs.schedules import SCHEDULES
from unisono.verbs._sizes import model_of
from unisono.verbs.train.planning import best_of_meshes

CASES = (
    ("1M", 2, 0.0),
    ("1M", 4, 0.0),
    ("10M", 2, 0.0),
    ("1M", 2, 1000.0),
    ("1M", 4, 1000.0),
    ("1M", 2, 100.0),
)
LIMIT, NEAR = 0.05, 4 / 3


@dataclass(frozen=True, slots=True)
class Field:
    """Where plans are played: ranks of one model on these hosts, for so many seconds of steps."""

    nursery: ForkServer
    recipe: Recipe
    ranks: int
    hosts: tuple[str, ...]

    def play(self, plan: Plan, micro_batch: int, seconds: float) -> float:
        """The median seconds of a step."""
        sized = self.recipe.train.model_copy(update={"micro_batch": micro_batch})
        recipe = self.recipe.model_copy(update={"train": sized})
        return float(
            played(self.nursery, recipe, self.ranks, str(plan), self.hosts, seconds)[0]["parts"]["step"]
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="a file of `unisono calibrate` (measured before each case)"
    )
    parser.add_argument("--cases", nargs="+", type=int, choices=range(len(CASES)), default=range(len(CASES)))
    parser.add_argument("--rounds", type=int, default=3, help="of the near ones, in turns (default 3)")
    options = parser.parse_args()
    given, worst = cluster(options.cluster) if options.cluster else None, 0.0
    with ForkServer("truth_rank:main", path=[str(Path(__file__).parent)]) as nursery:
        for name, ranks, megabits in (CASES[i] for i in options.cases):
            link = f"{megabits:.0f} Mbit/s" if megabits else "loopback"
            if megabits and not lab.possible():
                print(f"{name}, {ranks} ranks, {link}: skipped, needs root and the tools ip and tc")
                continue
            base = given or calibrated()
            got = Loaded(MODELS[name], Plan(), {})
            where = between(base, ranks, megabits)
            space = space_on(got, model_of(got, {}), Plan(), where, stack(where.stack))
            with lab.link(megabits) if megabits else nullcontext(()) as hosts:
                field = Field(nursery, MODELS[name], ranks, hosts)
                regret, text = case(field, space, options.rounds)
            worst = max(worst, regret)
            print(f"{name}, {ranks} ranks, {link}: {text}", flush=True)
    print(f"\nthe chosen plan takes at most {100 * worst:.1f} % longer than the best")
    return 0 if worst <= LIMIT else 1


def case(field: Field, space: search.Space, rounds: int) -> tuple[float, str]:
    """(how much longer the chosen plan takes than the quickest, as a share; a line on both)."""
    tried = [one.request for one in best_of_meshes(search.search(space, 64).best)]
    took = {(one.plan, one.micro_batch): field.play(one.plan, one.micro_batch, 1.0) for one in tried}
    chosen = min(took, key=took.__getitem__)
    programs = {program(one): one for one in [*search.candidates(space), chosen]}
    every = list(programs.values())
    short = {one: field.play(*one, 0.0) for one in every}
    near = [one for one in every if short[one] <= NEAR * min(short.values())]
    near = sorted(near, key=lambda one: short[one])[:8]
    if chosen not in near:
        near.append(chosen)
    first = turns(field, near, rounds)
    quickest = min(near, key=lambda one: statistics.median(first[one]))
    regret, again = 0.0, {chosen: first[chosen]}
    if quickest != chosen:
        again = turns(field, [chosen, quickest], 4 * rounds + 1)
        pairs = zip(again[chosen], again[quickest], strict=True)
        regret = statistics.median(mine / best for mine, best in pairs) - 1.0
    slowest = max(short.values()) / min(short.values())
    told = ", ".join(
        f"{what} {name_of(one)} {1e3 * statistics.median(again[one]):.1f} ms (priced {1e3 * priced(space, one):.1f})"
        for what, one in {"chosen": chosen, "quickest": quickest}.items()
    )
    return (
        regret,
        f"{len(every)} plans, {told}, {100 * regret:.1f} % more; the slowest {slowest:.0f} times the quickest",
    )


def priced(space: search.Space, one: tuple[Plan, int]) -> float:
    """Seconds of a step, by the calibration."""
    plan, micro_batch = one
    ask = PlanRequest(space.model, plan, space.cluster, space.stack, micro_batch, plan.micros or 1)
    return simulate(ask).price.step


def program(one: tuple[Plan, int]) -> tuple[Plan, int, Any]:
    """What tells a plan from another: its keys, with the timetable itself instead of its name."""
    plan, micro_batch = one
    timetable = SCHEDULES.read(plan.schedule).timetable(plan.pp, plan.micros or 1)
    return replace(plan, schedule="gpipe"), micro_batch, timetable.rows


def turns(field: Field, plans: list[tuple[Plan, int]], rounds: int) -> dict[tuple[Plan, int], list[float]]:
    """Seconds of a step of each plan, played for a second in every round."""
    took: dict[tuple[Plan, int], list[float]] = {one: [] for one in plans}
    for _ in range(rounds):
        for one in plans:
            took[one].append(field.play(*one, 1.0))
    return took


def name_of(one: tuple[Plan, int]) -> str:
    """The plan, and samples of a micro-batch."""
    return f"{one[0]} ({one[1]} a micro-batch)"


if __name__ == "__main__":
    sys.exit(main())

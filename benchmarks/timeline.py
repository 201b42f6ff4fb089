"""The simulated timeline beside the measured one: every timetable that `train` plays, with artificial stage costs.

    python benchmarks/timeline.py                     all timetables, about three minutes
    python benchmarks/timeline.py --schedule 1f1b --ranks 4 --out /tmp/timeline

Ranks play the timetable with the runtime's own interpreter, links and recorder; a stage waits instead of computing, so
two cores host any number of ranks, and its cost is known. The simulation is given those costs, what one rank alone
takes for an action beyond them (the interpreter, and a sleeper's late waking; measured first), and what a message takes
as measured before the first step, and nothing of what happens later. Both begin at the first action. Compared are the
length of a step and the start and stop of every action, as parts of the step's length; medians over the steps after the
first. Exit code 1 if any is more than 2 % off in each of three tries: a machine that has other things to do wakes its
sleepers late. `--out` leaves for each case a picture and a Chrome trace, for Perfetto, with the simulated ranks above
the measured ones.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.planner import artificial
from unisono.launch.fork_server import ForkServer
from unisono.observe import trace
from unisono.plan import grammar
from unisono.programs.pipeline import Action, Placed
from unisono.programs.schedules import SCHEDULES
from unisono.report import picture, sheet
from unisono.report import placed as lay
from unisono.report.picture import BarChart, BarRow

ROOT = str(Path(__file__).parents[1])
GOAL = 2.0  # per cent
SLOW_LINK = 0.01  # seconds a message
MICROS = 8
TRIES = 3
UNEVEN = (1.0, 1.5, 0.75, 1.25)  # of the base cost, over and over along the stages
ARTIFICIAL = Path(ROOT, "tests", "planner", "artificial.py")


@dataclass(frozen=True)
class Case:
    """A timetable on so many ranks, and what it costs: seconds of a forward of each stage (either half of a backward
    takes as long), of the link."""

    schedule: str
    ranks: int
    micros: int
    forward: tuple[float, ...]
    delay: float
    beyond: float = 0.0  # seconds that an action takes on one rank alone beyond what it waits

    @property
    def name(self) -> str:
        shape = "even" if len(set(self.forward)) == 1 else "uneven"
        return f"{self.schedule}-pp{self.ranks}-micros{self.micros}-{shape}"


@dataclass(frozen=True)
class Beside:
    """One case, played both ways. step, action: per cent of the simulated step, of the action that is furthest off."""

    case: Case
    message: float
    simulated: list[Placed]
    measured: list[Placed]
    step: float
    action: float

    @property
    def waits(self) -> tuple[float, float]:
        """The largest share of a row's time, from its first start to its last stop, in which it waits: measured and
        simulated."""
        both = (artificial.waits(placed, self.case.ranks) for placed in (self.measured, self.simulated))
        return next(both), next(both)

    @property
    def furthest(self) -> float:
        return max(abs(self.step), self.action)

    @property
    def agrees(self) -> bool:
        return self.furthest <= GOAL


def main() -> int:
    options = arguments()
    rows = []
    if not options.json:
        print("timetable    ranks  micros  stages  message   simulated    measured    step  furthest  waits: measured"
              " simulated  form")  # fmt: skip
    with ForkServer("tests.ranks:entry", path=[ROOT]) as nursery:
        more = beyond(nursery, options.cost * 1e-3)
        if not options.json:
            print(f"(an action takes {1e3 * more:.2f} ms beyond its stage's cost on one rank alone)")
        for case in cases(options):
            rows.append(tried(nursery, replace(case, beyond=more), options.steps))
            if not options.json:
                print(line(rows[-1]), flush=True)
            if options.out:
                pictures(rows[-1], Path(options.out))
    worst = max(row.furthest for row in rows)
    if options.json:
        print(json.dumps({"schema_version": 1, "goal_pct": GOAL, "rows": [as_dict(row) for row in rows]}))
    else:
        print(f"furthest off: {worst:.2f} % of a step, in {len(rows)} cases; the goal is {GOAL:.0f} %")
    return 0 if worst <= GOAL else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = grammar.known("schedule")
    parser.add_argument("--schedule", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4, 8), metavar="N")
    parser.add_argument("--steps", type=int, default=5, help="steps compared, after one that is not (5)")
    parser.add_argument(
        "--cost", type=float, default=50.0, help="milliseconds of a forward, before unevenness (50)"
    )
    parser.add_argument("--out", metavar="DIR", help="leave a picture and a trace of each case")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    """Each timetable and number of ranks: equal stages over plain links, unequal ones over links of a set delay."""
    made, base = [], options.cost * 1e-3
    for schedule in options.schedule:
        for ranks in (
            [1] if schedule == "accumulate" else options.ranks
        ):  # which is refused for more than one stage
            if not SCHEDULES.read(schedule).serves(ranks, MICROS):
                continue
            stages = SCHEDULES.read(schedule).timetable(ranks, MICROS).length
            made.append(Case(schedule, ranks, MICROS, (base,) * stages, 0.0))
            if ranks > 1:
                uneven = tuple(base * UNEVEN[stage % len(UNEVEN)] for stage in range(stages))
                made.append(Case(schedule, ranks, MICROS, uneven, SLOW_LINK))
    return made


def tried(nursery: ForkServer, case: Case, steps: int) -> Beside:
    """The case, again while it is over the goal: whatever else the machine does makes waits longer, never shorter."""
    best = beside(nursery, case, steps)
    for _ in range(TRIES - 1):
        if best.agrees:
            break
        again = beside(nursery, case, steps)
        best = min(best, again, key=lambda row: row.furthest)
    return best


def beyond(nursery: ForkServer, base: float) -> float:
    """Seconds that one rank alone takes for an action of the interpreter beyond what its stage waits."""
    alone = beside(nursery, Case("accumulate", 1, MICROS, (base,), 0.0), steps=3)
    length = max(p.stop for p in alone.simulated)
    return max(0.0, length * alone.step / 100) / (2 * MICROS)


def beside(nursery: ForkServer, case: Case, steps: int) -> Beside:
    """Play a case on processes and in the simulation."""
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "folder": folder, "schedule": case.schedule, "micros": case.micros, "delay": case.delay,
            "steps": steps + 1, **dict.fromkeys(("forward", "backward", "weight"), case.forward),
        }  # fmt: skip
        said = in_ranks(nursery, case.ranks, given)
        traces = [trace.read(Path(folder, f"rank{rank}.json.gz")) for rank in range(case.ranks)]
    message = max(said)
    timetable = SCHEDULES.read(case.schedule).timetable(case.ranks, case.micros)
    costs = [seconds + case.beyond for seconds in case.forward]
    simulated = artificial.simulated(timetable, costs, costs, costs, message)
    measured = [of_step(traces, step) for step in range(1, steps + 1)]
    return compared(case, message, simulated, measured)


def in_ranks(nursery: ForkServer, ranks: int, given: dict[str, Any]) -> list[float]:
    """What `artificial.play` returns in every rank."""
    argument = {
        "module": "tests.planner.artificial", "file": str(ARTIFICIAL), "function": "play", "group": ranks > 1,
        "kwargs": given,
    }  # fmt: skip
    outcome = nursery.run(argument, ranks, threads=1, timeout=300.0, backend="gloo")
    if outcome.error is not None:
        raise SystemExit(outcome.why())
    return [result["value"] for result in outcome.results if result is not None]


def of_step(traces: Sequence[trace.Trace], step: int) -> list[Placed]:
    """The computations of one step on all ranks, the first at zero."""
    found = (
        lay.computed((s for s in one.spans if s.tags.get("step") == step), row=one.rank) for one in traces
    )
    return lay.from_zero([p for placed in found for p in placed])


def compared(
    case: Case, message: float, simulated: list[Placed], measured: Sequence[Sequence[Placed]]
) -> Beside:
    """Medians over the measured steps beside the simulated one."""
    times: dict[tuple[int, Action], list[Placed]] = {}
    for placed in measured:
        for p in placed:
            times.setdefault((p.row, p.action), []).append(p)
    middle = [
        Placed(
            *key,
            statistics.median(p.start for p in found),
            statistics.median(p.stop for p in found),
        )
        for key, found in times.items()
    ]
    planned = {(p.row, p.action): p for p in simulated}
    if planned.keys() != times.keys():
        raise SystemExit(f"{case.name}: what was played is not what was simulated")
    length = max(p.stop for p in simulated)
    took = statistics.median(max(p.stop for p in placed) for placed in measured)
    off = (
        max(abs(p.start - planned[p.row, p.action].start), abs(p.stop - planned[p.row, p.action].stop))
        for p in middle
    )
    return Beside(
        case,
        message,
        simulated,
        lay.from_zero(middle),
        step=100 * (took / length - 1),
        action=100 * max(off) / length,
    )


def line(row: Beside) -> str:
    case = row.case
    shape = "even" if len(set(case.forward)) == 1 else "uneven"
    simulated, measured = (max(p.stop for p in placed) for placed in (row.simulated, row.measured))
    return (
        f"{case.schedule:<12} {case.ranks:>5} {case.micros:>7}  {shape:<6} {1e3 * row.message:>6.2f} ms"
        f" {1e3 * simulated:>8.1f} ms {1e3 * measured:>8.1f} ms {row.step:>+6.2f} % {row.action:>6.2f} %"
        f"        {row.waits[0]:>8.3f} {row.waits[1]:>9.3f} {form(case):>5}"
        f"{'' if row.agrees else '   MORE THAN THE GOAL'}"
    )


def form(case: Case) -> str:
    """The wait by the schedule's formula; nothing where stages are unequal or messages take long. Overlapped pairs are
    played one after the other here, and wait at most so long."""
    if case.ranks == 1 or case.delay or len(set(case.forward)) > 1:
        return "-"
    return f"{artificial.closed(case.schedule, case.ranks, case.micros, case.forward[0]):.3f}"


def pictures(row: Beside, folder: Path) -> None:
    """NAME.png and NAME.json.gz."""
    names = [f"rank {rank}" for rank in range(row.case.ranks)]
    trace.write_groups(
        folder / f"{row.case.name}.json.gz",
        {"simulated": lay.lanes(row.simulated, names), "measured": lay.lanes(row.measured, names)},
    )
    titles = [
        (f"{word}: {1e3 * max(p.stop for p in placed):.1f} ms", placed)
        for word, placed in (("Simulated", row.simulated), ("Measured", row.measured))
    ]
    said = (
        f"{row.case.schedule} on {row.case.ranks} ranks, {row.case.micros} micro-batches:"
        f" measured beside simulated, {row.step:+.2f} %"
    )
    until = max(p.stop for _, placed in titles for p in placed)
    rows, ticks = [BarRow(name) for name in names], picture.time_ticks(0.0, until)
    charts = [[BarChart(title, rows, lay.bars(placed), until, ticks=ticks)] for title, placed in titles]
    sheet.write(folder / f"{row.case.name}.png", said, "unisono benchmarks/timeline.py", charts)


def as_dict(row: Beside) -> dict[str, Any]:
    case = row.case
    return {
        "schedule": case.schedule, "ranks": case.ranks, "micros": case.micros, "forward_s": list(case.forward),
        "message_s": row.message, "simulated_s": max(p.stop for p in row.simulated),
        "waits_measured": row.waits[0], "waits_simulated": row.waits[1],
        "measured_s": max(p.stop for p in row.measured), "step_pct": row.step, "action_pct": row.action,
        "pass": row.agrees,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

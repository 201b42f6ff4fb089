"""Random pairs of faults, each on a run of its own: `python -m tests.launch.pairs --pairs 200`.

Two things that go wrong one after the other are worth more tests than twenty that are made good one by one: the second
comes while the ranks still meet because of the first. A pair is two kinds, two victims (a rank, the helper, the
supervisor) and a distance: the same moment, another phase of the step, the next step, milliseconds later, or the
rendezvous itself. Each run has to end by itself, in the bits of the undisturbed one, with every leaf of every step counted
once, nobody left behind, and nobody lost but the victims. All commands are forked from one process that has torch
imported. Prints a row a pair, then the sum.

    python -m tests.launch.pairs --pairs 40 --seed 3
    python -m tests.launch.pairs --chaos "kill:who=1:step=6 kill:who=2:step=6 kill:who=3:step=6"
    python -m tests.launch.pairs --pairs 40 --kinds kill --within 3    # a pair of ranks takes no longer, or it failed
"""

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.launch import soak
from tests.verbs.jobs import Done, started
from unisono_contrib.programs.chaos import sequel
from unisono_contrib.programs.chaos.fault import ABOVE, HELPER, IN_STEP, SUPERVISOR, Fault
from unisono_contrib.programs.chaos.script import Script, read

PLANS = (
    "dp=4 sync=canonical",
    "dp=2 shard=2 sync=canonical",
    "dp=2 pp=2 sync=canonical",
    "dp=2 cp=2 sync=canonical",
)
KINDS = ("kill", "kill", "kill", "segv", "stop", "cut")
STEPS, SAVE_EVERY = 80, 4
FIRST = range(3, 10)
"""The steps of the first fault: far enough from the end that the second one, up to 0.8 s later, still finds a run."""
HUNG = 90.0
"""Seconds after which a run that has not ended counts as hung: one takes two, or ten with two imports of torch."""
ABOVE_SHARE = 0.15
"""Of pairs, in how many the helper or the supervisor is a victim."""
SNAPSHOTS = ("--launch.snapshot_every", "1")  # so that whoever is lost, memory holds the run


def drawn(seed: int, kinds: Sequence[str], ranks: int = 4) -> Script:
    """The pair of a seed."""
    dice = random.Random(seed)
    first = Fault(dice.choice(kinds), dice.randrange(ranks), dice.choice(FIRST), phase=dice.choice(IN_STEP))
    kind, step = dice.choice(kinds), first.step or 0
    match dice.choice(("moment", "phase", "step", "late", "late", "recovery")):
        case "moment":
            second = Fault(kind, step=step, phase=first.phase)
        case "phase":
            second = Fault(kind, step=step, phase=dice.choice(IN_STEP))
        case "step":
            second = Fault(kind, step=step + 1, phase=dice.choice(IN_STEP))
        case "late":
            second = Fault(kind, step=step, phase=dice.choice(IN_STEP), late=round(dice.uniform(0.0, 0.8), 3))
        case _:
            second = Fault(kind, phase="recovery", late=round(dice.choice((0.0, dice.uniform(0.0, 0.3))), 3))
    pair = [first, _befalling(second, dice.randrange(ranks))]
    if dice.random() < ABOVE_SHARE:
        at = dice.randrange(2)
        above = Fault(
            "kill", dice.choice(ABOVE), step=pair[at].step, phase=pair[at].phase, late=pair[at].late
        )
        pair[at] = above if above.step is not None else _befalling(above, HELPER)
    return Script(tuple(pair))


def _befalling(fault: Fault, who: int | str) -> Fault:
    return Fault(fault.what, who, fault.step, phase=fault.phase, late=fault.late)


def words(script: Script) -> str:
    """As `--chaos` takes it."""
    keys = [
        {key: value for key, value in fault.as_json().items() if key != "what"} for fault in script.faults
    ]
    return " ".join(
        ":".join([fault.what, *(f"{key}={value}" for key, value in said.items())])
        for fault, said in zip(script.faults, keys, strict=True)
    )


def play(recipe: Path, plan: str, number: int, chaos: str) -> soak.Soaked:
    """One run under a script, with what is wrong with how it ended."""
    problems = list[str]()

    def start(argv: list[str]) -> tuple[int, str, str]:
        with started(recipe.parent, *argv, *SNAPSHOTS) as job:
            if not job.ends_within(HUNG):
                problems.append(f"hung for {HUNG:.0f} s: {job.lines[-3:]}")
                job.kill_group()
            done: Done = job.done()
        problems.extend([f"left behind: {done.left}"] if done.left else [])
        return done.code, done.out, done.err

    got = soak.run(recipe, plan, number, chaos, start)
    got.problems += problems
    return got


def judged(got: soak.Soaked, plain: soak.Soaked, script: Script) -> None:
    """Put down what is wrong with a run, beside the one without faults."""
    soak.compare(got, plain, STEPS)
    above = any(fault.who in ABOVE for fault in script.faults)
    if above:  # all died with it, so that a meeting that was due may never have been
        got.problems = [one for one in got.problems if not one.startswith("never came")]
    for row in sequel.what_followed(sequel.read(got.run_dir)):
        unseen = row.get("detected") is None
        nothing = unseen and row["what"] == "cut"  # was connected just then
        together = unseen and any(
            f.who == SUPERVISOR for f in script.faults
        )  # with whoever would have seen it
        if nothing or together or row.get("at_step") == STEPS:  # or all was done
            got.problems = [one for one in got.problems if one != f"not followed by a step: {row}"]
    hit = {str(fault.who) for fault in script.faults if not fault.kind.stays} | (
        {"helper"} if above else set()
    )
    for line in sequel.read(got.run_dir):
        if line["event"] == "detected" and (
            others := {str(who) for who in line["lost"]} - hit - {SUPERVISOR}
        ):
            got.problems.append(f"lost, though nothing had befallen them: {sorted(others)}")


def source(got: soak.Soaked) -> str:
    """From where the run went on: memory, snapshot, a checkpoint or the beginning, as it said itself."""
    text = (got.run_dir.parent.parent / "stderr.txt").read_text()
    found = re.findall(r"going on from (\S+)", text)
    if found:
        return ",".join(sorted(set(found)))
    return "snapshot" if "by snapshots of" in text else "memory"


def slowest(got: soak.Soaked) -> float | None:
    """Seconds from the later fault to the next step; None where none followed."""
    rows = [row for row in sequel.what_followed(sequel.read(got.run_dir)) if row.get("next") is not None]
    last = max(rows, key=lambda row: row["injected"], default=None)
    return last["next"] if last is not None else None


def row_of(number: int, got: soak.Soaked, chaos: str) -> str:
    took = slowest(got)
    rows = sequel.what_followed(sequel.read(got.run_dir))
    played = sum(row["injected"] is not None for row in rows)
    return (
        f"{number:>4}  {got.plan.removesuffix(' sync=canonical'):<13}  {played}/{len(rows)}"
        f"  {'     -' if took is None else f'{took:6.2f}'}  {got.seconds:5.1f}  {source(got):<12}"
        f"  {'FAILED' if got.problems else 'ok':<6}  {chaos}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first pair; the next has the next")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--chaos", help="this script under each plan, in the place of random pairs")
    parser.add_argument("--within", type=float, help="seconds to the next step in which pairs of ranks go on")
    parser.add_argument("--keep", help="a folder for the runs, which are thrown away without")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    with tempfile.TemporaryDirectory() as thrown:
        folder = Path(given.keep or thrown)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = soak.write_recipe(folder, STEPS, save_every=SAVE_EVERY)
        plain = {plan: play(recipe, plan, 0, "") for plan in given.plans}
        for one in plain.values():
            print(
                f"   0  {one.plan}: {one.digest()[:16]} undisturbed, {one.seconds:.1f} s",
                *one.problems,
                flush=True,
            )
        print(" no.  plan           played  next s  total  goes on from  state   script", flush=True)
        seeds = range(given.seed, given.seed + (len(given.plans) if given.chaos else given.pairs))
        runs = list[tuple[soak.Soaked, Script]]()
        for seed in seeds:
            script = read(given.chaos, 4, STEPS) if given.chaos else drawn(seed, kinds)
            plan = given.plans[seed % len(given.plans)]
            got = play(recipe, plan, seed, words(script))
            judged(got, plain[plan], script)
            took, ranks_only = slowest(got), not any(fault.who in ABOVE for fault in script.faults)
            if given.within and ranks_only and took is not None and took > given.within:
                got.problems.append(f"{took:.2f} s to the next step")
            runs.append((got, script))
            print(row_of(seed, got, words(script)), *got.problems, sep="\n      ", flush=True)
    print(*summed_up(runs), sep="\n")
    return int(any(got.problems for got, _ in runs))


def summed_up(runs: Sequence[tuple[soak.Soaked, Script]]) -> list[str]:
    """How many ended as they should, and how long ranks took to go on: of pairs of ranks, and of others."""
    failed = sum(bool(got.problems) for got, _ in runs)
    lines = [f"{len(runs)} pairs, {len(runs) - failed} in the bits of the undisturbed run, {failed} failed"]
    for name, above in (("of ranks", False), ("with helper or supervisor", True)):
        own = [got for got, script in runs if any(fault.who in ABOVE for fault in script.faults) == above]
        times = [took for got in own if (took := slowest(got)) is not None]
        if times:
            late, from_ = sum(took > 3.0 for took in times), Counter(source(got) for got in own)
            where = ", ".join(f"{count} from {name}" for name, count in from_.most_common())
            lines.append(
                f"{len(own)} {name}: {median(times):.2f} s to the next step (median), {max(times):.2f} s at most,"
                f" {late} over 3 s; {where}"
            )
    return [*lines, f"load {os.getloadavg()[0]:.1f}, {time.strftime('%H:%M')}"]


if __name__ == "__main__":
    sys.exit(main())

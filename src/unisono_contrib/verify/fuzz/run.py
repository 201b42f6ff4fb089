"""The fuzz itself: cases proven on ranks that are threads, in several processes; what fails is shrunk."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from pathlib import Path
from typing import cast

from unisono.config import resolve
from unisono.launch.fork_server import ForkServer
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.verify.prover import ENTRY, Proof, prove_on
from unisono_contrib.launch.on_threads import ThreadForkServer
from unisono_contrib.verify.fuzz.draw import PLANS, STEPS, FuzzCase, draw_plan, draw_recipe
from unisono_contrib.verify.fuzz.found import FuzzFailure, FuzzResult, kind_of, shrunk

TURNS = 4 * PLANS  # plans drawn for one recipe at most
KEPT = (
    "train.dtype", "train.lr", "train.steps", "train.global_batch", "train.micro_batch", "model.kind", "model.n_layer",
    "model.n_head", "model.d_model", "model.context", "model.hidden", "model.channels", "data.source",
    "model.n_experts",
)  # fmt: skip
"""Without them a case would be larger."""


PlanFailure = FuzzFailure[FuzzCase]
PlanResult = FuzzResult[FuzzCase]


def fuzz(
    most: int,
    seed: int,
    texts: Path,
    said: Callable[[PlanResult], None] = lambda result: None,
    jobs: int | None = None,
) -> PlanResult:
    """Prove at least `most` drawn plans; ends early after the first failures, which are shrunk. said: hears what is
    known so far after each recipe. texts: what `documents` wrote. jobs: processes beside each other, as many as
    usable cores if None; 1: this one."""
    result, numbers = PlanResult(), count()
    for part in _parts(seed, texts, numbers, jobs or len(os.sched_getaffinity(0))):
        result.add(part)
        said(result)
        if result.failures or result.proven + result.unproven >= most:
            break
    result.failures = [shrink(failure) for failure in result.failures[:3]]
    return result


def _parts(seed: int, texts: Path, numbers: Iterator[int], jobs: int) -> Iterator[PlanResult]:
    """What came of each recipe, without end."""
    if jobs == 1:
        yield from (prove_recipe(seed, number, texts) for number in numbers)
        return
    # Spawned: torch is imported here already, and a fork of its threads would hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _be_quiet) as pool:
        under_way: dict[Future[PlanResult], int] = {}
        try:
            while True:
                while len(under_way) < 2 * jobs:
                    number = next(numbers)
                    under_way[pool.submit(prove_recipe, seed, number, texts)] = number
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    number = under_way.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        what = f"a process died in one of the recipes {sorted([number, *under_way.values()])}"
                        fix = f"python -X faulthandler -m unisono verify --fuzz 1 --seed {seed} alone shows where"
                        raise UsageError(what, where="unisono verify --fuzz", fix=fix, code="V11") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _be_quiet() -> None:
    """What a library prints is no line of the fuzz; a Ctrl-C is for the process that asks."""
    import signal
    import sys

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)


def drawn(seed: int, number: int, texts: Path) -> tuple[list[FuzzCase], Counter[str]]:
    """The cases of the recipe with this number, and what was refused of others on the way."""
    keys, refused = draw_recipe(seed, number, texts), Counter[str]()
    cases: dict[str, FuzzCase] = {}
    for turn in range(TURNS):
        case = FuzzCase(keys, draw_plan(seed, number, turn, keys))
        try:
            plan = plan_of(case)
        except UsageError as error:
            refused[_kind(error)] += 1
            continue
        cases.setdefault(str(plan), case)
        if len(cases) == PLANS:
            break
    return list(cases.values()), refused


def prove_recipe(seed: int, number: int, texts: Path) -> PlanResult:
    """Draw a recipe and its plans, and prove those that are not refused."""
    cases, refused = drawn(seed, number, texts)
    result = PlanResult(refused=refused)
    for case, proof in zip(cases, proofs_of(cases), strict=True):
        if proof.cause == "refused":
            result.refused[f"when it was played: {proof.explanation}"] += 1
        elif proof.passed:
            result.prove(case)
        elif proof.verdict == "unproven":
            result.unproven += 1
        else:
            result.failures.append(failure_of(case, proof))
    return result


def failure_of(case: FuzzCase, proof: Proof) -> PlanFailure:
    """The failure of a case whose proof this is."""
    said = f"{proof.first_divergence}; {proof.cause}: {proof.explanation}"
    return FuzzFailure(case, case, said.replace("\n", " "), proof.as_dict())


def _kind(error: UsageError) -> str:
    first = error.problems[0] if isinstance(error, ConfigProblems) else error
    return kind_of(first.code, first.what)


def plan_of(case: FuzzCase) -> Plan:
    """The plan that the case's recipe is played by. Raises UsageError where the house refuses it."""
    recipe = case.recipe()
    plan = Plan.parse(case.plan if "precision" in case.words else f"{case.plan} precision=fp64")
    resolved = resolve(recipe, plan, None).plan
    if problems := resolved.check(recipe):
        raise ConfigProblems(problems)
    return resolved


def proofs_of(cases: list[FuzzCase], entry: str = ENTRY, marks: Sequence[str] = ()) -> list[Proof]:
    """The proofs of cases that share their recipe. Where its one device does not play, each has that as its failure.
    entry, marks: see `prove_on`."""
    import torch

    torch.set_num_threads(1)
    if not cases:
        return []
    recipe, plans = cases[0].recipe(), [plan_of(case) for case in cases]
    try:
        server = cast(ForkServer, ThreadForkServer(entry))  # in all that a proof asks of it
        return prove_on(server, recipe, plans, STEPS, keep_going=True, marks=marks)
    except Exception as error:  # of the reference, whatever it is: it is this recipe's result
        cause = "refused" if isinstance(error, UsageError) else "raised"
        return [_unplayed(plan, cause, f"{type(error).__name__}: {error}") for plan in plans]


def _unplayed(plan: Plan, cause: str, why: str) -> Proof:
    return Proof(
        str(plan),
        plan.world,
        "EXACT",
        0.0,
        False,
        {},
        False,
        f"raised: {why}",
        cause,
        why.splitlines()[0],
        "wrong",
    )


def is_wrong(proof: Proof) -> bool:
    """Whether a proof is a failure, and not a refusal that came late."""
    return proof.verdict == "wrong" and proof.cause != "refused"


def shrink(failure: PlanFailure, entry: str = ENTRY, marks: Sequence[str] = ()) -> PlanFailure:
    """The failure with the least case that fails too: no word or key of it can be left out, and no number made less.
    entry, marks: see `prove_on`."""

    def fails(case: FuzzCase) -> PlanFailure | None:
        try:
            (proof,) = proofs_of([case], entry, marks)
        except UsageError:  # refused: no smaller case
            return None
        return failure_of(case, proof) if is_wrong(proof) else None

    return shrunk(failure, _smaller, fails)


def _smaller(case: FuzzCase) -> Iterator[FuzzCase]:
    """Cases with one word or key less, or with half of it; what matters most goes first."""
    for key, word in case.words.items():
        yield FuzzCase(case.keys, {k: v for k, v in case.words.items() if k != key})
        if word.isdigit() and int(word) > 2:
            yield FuzzCase(case.keys, {**case.words, key: "2"})
        if ":" in word:
            yield FuzzCase(case.keys, {**case.words, key: word.partition(":")[0]})
    for key in case.keys:
        if key not in KEPT:
            yield FuzzCase({k: v for k, v in case.keys.items() if k != key}, case.words)
    least = {
        "model.n_layer": 2,
        "model.d_model": 8,
        "model.context": 8,
        "train.global_batch": 4,
        "train.micro_batch": 1,
    }
    for key, value in least.items():
        if case.keys.get(key, value) > value:
            yield FuzzCase({**case.keys, key: value}, case.words)

"""Bugs put in, proofs asked for: of a plan that `train` plays, or of a user's own loop."""

import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.threads import ThreadForkServer
from tests.verify.mutations.planting import Bug, Planting
from unisono.config import Recipe
from unisono.library.loop_check import ENTRY, LoopVerdict, not_played, prove_loop_on
from unisono.plan import Plan
from unisono.spec.errors import UnisonoError
from unisono.spec.model import kind_of
from unisono.verify.prover import Proof, prove_on


@dataclass(frozen=True, slots=True)
class Found:
    """What a proof says of a bug. step: the first that is wrong, from 1; 0 if none is."""

    caught: bool
    cause: str | None
    text: str
    step: int

    def named(self, bug: Bug) -> bool:
        """Whether the cause is one that the bug may rightly be given."""
        return self.cause in bug.causes


class Planted(ThreadForkServer):
    """A bug that is there while several ranks play a loop, and not while one does."""

    def __init__(self, bug: Bug) -> None:
        super().__init__(ENTRY)
        self._bug = bug

    def run(self, argument: dict[str, Any], ranks: int, *given: Any) -> Any:
        with Planting().of(self._bug) if ranks > 1 else nullcontext():
            return super().run(argument, ranks, *given)


def prove_with(bugs: Iterable[Bug], steps: int = 2) -> dict[str, Found]:
    """Name → what was found under its plan, in their order."""
    chosen = list(bugs)
    found = {bug.name: _of_loop(bug, steps) for bug in chosen if bug.loop is not None}
    nursery = ThreadForkServer("tests.verify.mutations.entry:main")
    for group in _alike([bug for bug in chosen if bug.loop is None]):
        plans = [Plan.parse(bug.plan) for bug in group]
        with TemporaryDirectory() as folder:
            given = recipe(group[0], Path(folder))
            marks = [bug.name for bug in group]
            proofs = prove_on(nursery, given, plans, steps, keep_going=True, marks=marks)
        found |= {bug.name: _of_plan(proof) for bug, proof in zip(group, proofs, strict=True)}
    return {bug.name: found[bug.name] for bug in chosen}


def _of_plan(proof: Proof) -> Found:
    step = re.search(r"step (\d+)", proof.first_divergence or "")
    return Found(not proof.passed, proof.cause, proof.explanation or "", int(step[1]) if step else 0)


def _of_loop(bug: Bug, steps: int) -> Found:
    assert bug.loop is not None
    plan = Plan.parse(bug.plan)
    try:
        verdict: LoopVerdict = prove_loop_on(Planted(bug), bug.loop, plan, steps)
    except UnisonoError as error:  # the run itself found it
        verdict = not_played(plan, error)
    step, _ = verdict.first or (0, "")
    return Found(not verdict.passed, verdict.cause, verdict.explanation or "", step)


def recipe(bug: Bug, folder: Path) -> Recipe:
    """A very small GPT, and what the bug wants otherwise. folder: where a text of its own may lie."""
    model = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "dropout": bug.dropout}
    train = {
        "steps": 6, "global_batch": 8, "micro_batch": 1, "dtype": "float64", "lr": 1e-2, "warmup_steps": 2,
        "clip": 0.5, "optimizer": bug.optimizer,
    }  # fmt: skip
    data = {}
    if bug.text:
        data["source"] = f"text:{folder / 'text.txt'}"
        (folder / "text.txt").write_text(bug.text * 60)
    sections = {"model": model, "train": train, "data": data}
    for key, value in bug.recipe.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    if "kind" in model:
        own = {key.partition(".")[2]: value for key, value in bug.recipe.items() if key.startswith("model.")}
        sections["model"] = {"context": 8, **own} if kind_of(own["kind"]).reads == "tokens" else own
    return Recipe(seed=3, launch={"timeout": 900.0}, **sections)  # for all plans of a size together


def _alike(bugs: list[Bug]) -> list[list[Bug]]:
    """Bugs of one recipe together: they share a reference. A bug that the reference has too is alone."""
    kinds: dict[object, list[Bug]] = {}
    for bug in bugs:
        kind = bug.dropout, bug.optimizer, str(bug.recipe), bug.text, bug.both and bug.name
        kinds.setdefault(kind, []).append(bug)
    return list(kinds.values())

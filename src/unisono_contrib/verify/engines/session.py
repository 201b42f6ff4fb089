"""A proof with other engines beside torch: what they refuse, what they play, and the rows that come of it."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from unisono.config import Recipe, Resolved, resolve
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.verify.prover import one_device
from unisono_contrib.verify.engines import ENGINES, StepEngine, beyond_engines
from unisono_contrib.verify.engines.answers import EngineQuestion
from unisono_contrib.verify.engines.beside import ONE, AnswerTable, EngineAnswer


@dataclass(frozen=True, slots=True)
class Unplayed:
    """A plan that an engine cannot play, while others can."""

    engine: str
    plan: str
    error: UsageError


@dataclass(slots=True)
class EngineSession:
    """The engines of one call of `verify`.

    alone: names of those that play one device alone. covering: plans were chosen to cover a recipe, so that one may be
    none of an engine's. shelf: folder of the steps as tensors, while it is open.
    """

    engines: Sequence[StepEngine]
    alone: frozenset[str]
    plans: Sequence[Resolved]
    covering: bool = False
    refused: list[Unplayed] = field(default_factory=list)
    shelf: Path = Path()

    @classmethod
    def of(
        cls,
        witnesses: Sequence[str],
        engines: Sequence[str],
        recipe: Recipe,
        plans: Sequence[Plan],
        covering: bool = False,
    ) -> "EngineSession":
        """The engines by their texts, such as `jax` and `jax:processes=true`. witnesses: those that play one device
        alone. Raises UsageError C10 where a library is missing, V07 where the recipe, or every plan, is
        none that an engine can play."""
        read = [ENGINES.read(text) for text in (*engines, *witnesses)]
        read = list({engine.name: engine for engine in reversed(read)}.values())
        spread = {ENGINES.read(text).name for text in engines}
        alone = frozenset(engine.name for engine in read if engine.name not in spread or not engine.spreads)
        beside = cls(read, alone, [resolve(recipe, plan) for plan in plans], covering)
        for engine in read:
            if engine.library and find_spec(engine.library) is None:
                what = f"--engine {engine.name} needs {engine.library}, which is not installed"
                fix = f"pip install 'unisono[{engine.library}]'"
                raise UsageError(what, where="unisono verify", fix=fix, code="C10")
            problems = [beside.problem(engine, resolved) for resolved in beside.plans]
            errors = [_error(engine, r, why) for r, why in zip(beside.plans, problems, strict=True) if why]
            if errors and len(errors) == len(problems):
                raise errors[0]
            beside.refused += [
                Unplayed(engine.name, str(resolved.plan), _error(engine, resolved, why))
                for resolved, why in zip(beside.plans, problems, strict=True)
                if why
            ]
        return beside

    def problem(self, engine: StepEngine, resolved: Resolved) -> str:
        """Why an engine has no part in this plan; "" where it has."""
        played = _alone(resolved) if engine.name in self.alone else resolved
        return beyond_engines(resolved) or engine.problem(played)

    @contextmanager
    def opened(self) -> Iterator["EngineSession"]:
        """With a shelf, which is gone afterwards."""
        self.shelf = Path(tempfile.mkdtemp(prefix="unisono-engines-"))
        try:
            yield self
        finally:
            shutil.rmtree(self.shelf, ignore_errors=True)

    def tables(self) -> Iterator[AnswerTable]:
        """A table for each one device that plans are held to, once torch has filled the shelf."""
        for folder in sorted(self.shelf.glob("one-*"), key=lambda path: int(path.name[4:])):
            mine = [
                (number, resolved)
                for number, resolved in enumerate(self.plans)
                if (at := self.shelf / f"plan-{number}" / "question").is_file()
                and at.read_text() == folder.name
            ]
            if mine:
                yield self._table(folder, mine)

    def _table(self, folder: Path, plans: Sequence[tuple[int, Resolved]]) -> AnswerTable:
        answers = [EngineAnswer("torch", ONE, 1, folder)]
        alone = _alone(plans[0][1])
        for engine in self.engines:
            out = self.shelf / f"{engine.name}-{folder.name}"
            engine.play(folder, alone, out)
            answers.append(EngineAnswer(engine.name, ONE, 1, out))
        for number, resolved in plans:
            text, ranks = str(resolved.plan), resolved.plan.world
            if not beyond_engines(resolved):
                answers.append(EngineAnswer("torch", text, ranks, self.shelf / f"plan-{number}"))
            for engine in (engine for engine in self.engines if engine.name not in self.alone):
                if any(u.engine == engine.name and u.plan == text for u in self.refused):
                    continue
                out = self.shelf / f"{engine.name}-{number}"
                engine.play(folder, resolved, out)
                answers.append(EngineAnswer(engine.name, text, ranks, out))
        return AnswerTable(EngineQuestion.read(folder), answers)


def _alone(resolved: Resolved) -> Resolved:
    """The one device that a plan is held to. The micro-batches of a step are the same."""
    micro = resolved.recipe.train.model_copy(update={"micro_batch": resolved.batch.micro_batch})
    recipe = resolved.recipe.model_copy(update={"train": micro, "plan": ""})
    return resolve(recipe, one_device(resolved.plan))


def _error(engine: StepEngine, resolved: Resolved, why: str) -> UsageError:
    return UsageError(
        f"{engine.name} cannot be set beside {why}",
        where=f"{resolved.plan}",
        fix="a recipe and a plan of docs/engines.md, or verify without this engine",
        code="V07",
    )

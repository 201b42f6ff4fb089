"""A proof with other engines beside torch: what they refuse, what they play, and the rows that come of it."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from unisono.config import Recipe, Resolved, resolve
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.verify.prover import one_device
from unisono_contrib.verify.engines import ENGINES, Engine
from unisono_contrib.verify.engines.answers import Question
from unisono_contrib.verify.engines.beside import ONE, Answer, Table


@dataclass(frozen=True, slots=True)
class Unplayed:
    """A plan that an engine cannot play, while others can."""

    engine: str
    plan: str
    error: UsageError


@dataclass(slots=True)
class Beside:
    """The engines of one call of `verify`. shelf: folder of the steps as tensors, while it is open."""

    engines: Sequence[Engine]
    plans: Sequence[Resolved]
    refused: list[Unplayed] = field(default_factory=list)
    shelf: Path = Path()

    @classmethod
    def of(cls, witnesses: Sequence[str], engines: Sequence[str], recipe: Recipe, plans: Sequence[Plan]) -> "Beside":
        """The engines by their texts, such as `jax` and `jax:processes=true`. witnesses: those that play one device
        alone. Raises UsageError V05 where the recipe, or every plan, is none that an engine can play."""
        read = [ENGINES.read(text) for text in dict.fromkeys((*witnesses, *engines))]
        beside = cls(read, [resolve(recipe, plan) for plan in plans])
        for engine in read:
            problems = [engine.problem(resolved) for resolved in beside.plans]
            errors = [_error(engine, r, why) for r, why in zip(beside.plans, problems, strict=True) if why]
            if errors and len(errors) == len(problems):
                raise errors[0]
            beside.refused += [
                Unplayed(engine.name, str(resolved.plan), _error(engine, resolved, why))
                for resolved, why in zip(beside.plans, problems, strict=True)
                if why
            ]
        return beside

    @contextmanager
    def opened(self) -> Iterator["Beside"]:
        """With a shelf, which is gone afterwards."""
        self.shelf = Path(tempfile.mkdtemp(prefix="unisono-engines-"))
        try:
            yield self
        finally:
            shutil.rmtree(self.shelf, ignore_errors=True)

    def tables(self) -> Iterator[Table]:
        """A table for each one device that plans are held to, once torch has filled the shelf."""
        for folder in sorted(self.shelf.glob("one-*"), key=lambda path: int(path.name[4:])):
            mine = [
                (number, resolved)
                for number, resolved in enumerate(self.plans)
                if (at := self.shelf / f"plan-{number}" / "question").is_file() and at.read_text() == folder.name
            ]
            if mine:
                yield self._table(folder, mine)

    def _table(self, folder: Path, plans: Sequence[tuple[int, Resolved]]) -> Table:
        answers = [Answer("torch", ONE, 1, folder)]
        first = plans[0][1]
        alone = resolve(first.recipe, one_device(first.plan))
        for engine in self.engines:
            out = self.shelf / f"{engine.name}-{folder.name}"
            engine.play(folder, alone, out)
            answers.append(Answer(engine.name, ONE, 1, out))
        for number, resolved in plans:
            text, ranks = str(resolved.plan), resolved.plan.world
            answers.append(Answer("torch", text, ranks, self.shelf / f"plan-{number}"))
            for engine in (engine for engine in self.engines if engine.spreads):
                if any(u.engine == engine.name and u.plan == text for u in self.refused):
                    continue
                out = self.shelf / f"{engine.name}-{number}"
                engine.play(folder, resolved, out)
                answers.append(Answer(engine.name, text, ranks, out))
        return Table(Question.read(folder), answers)


def _error(engine: Engine, resolved: Resolved, why: str) -> UsageError:
    return UsageError(
        f"{engine.name} cannot be set beside {why}",
        where=f"{resolved.plan}",
        fix="a recipe and a plan of docs/engines.md, or verify without this engine",
        code="V05",
    )

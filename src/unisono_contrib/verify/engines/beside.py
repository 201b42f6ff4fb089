"""Answers of several engines beside each other: each against the one device of every engine. No torch here."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from unisono_contrib.verify.engines.answers import Array, EngineQuestion, read_step
from unisono_contrib.verify.engines.numpy.play import law_of
from unisono_contrib.verify.engines.numpy.update import stepped

BOUND = 1e-12
KINDS = ("loss", "grad", "param", "optim")
_KIND_OF = {"raw": "grad", "grad": "grad", "model": "param", "optim": "optim"}


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What one engine computed under one plan. folder: of its steps."""

    engine: str
    plan: str
    ranks: int
    folder: Path

    @property
    def name(self) -> str:
        """As messages have it: `jax dp=2`."""
        return f"{self.engine} {self.plan}"

    @property
    def alone(self) -> bool:
        """Whether it is the one device of its engine."""
        return self.ranks == 1 and self.plan == ONE


ONE = "one device"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A row of `verify --engine`. against: the other engines' one devices. max_rel_err: by kind, the largest over all
    of them and all steps; no entry for what neither side computes. first_divergence: text, or None."""

    engine: str
    plan: str
    ranks: int
    against: tuple[str, ...]
    max_rel_err: Mapping[str, float]
    bound: float = BOUND
    first_divergence: str | None = None

    @property
    def passed(self) -> bool:
        return self.first_divergence is None

    def as_dict(self) -> dict[str, Any]:
        """The object of --json."""
        finite = {kind: min(error, 1e308) for kind, error in self.max_rel_err.items()}  # JSON has no infinity
        return {**asdict(self), "max_rel_err": finite, "pass": self.passed}


@dataclass(slots=True)
class _Comparison:
    """One answer against the one device of another engine, all steps. errors: largest by kind. first: what is wrong."""

    question: EngineQuestion
    other: EngineAnswer
    answer: EngineAnswer
    errors: dict[str, float] = field(default_factory=dict)
    first: str | None = None

    def run(self) -> "_Comparison":
        for step in range(self.question.steps):
            want, got = read_step(self.other.folder, step), read_step(self.answer.folder, step)
            self._constants(want, step)
            self._take("loss", "loss", got["loss"], want["loss"], 0.0, step)
            self._gradients(want, got, step)
            for engine, theirs in ((self.other.engine, got), (self.answer.engine, want)):
                if engine == "numpy":
                    self._update(theirs, step)
        return self

    def _constants(self, want: Mapping[str, Array], step: int) -> None:
        """The model's cosines and sines are float32: each is right to the rounding of its angle."""
        batch = self.question.batch(step)
        for key in {"cos", "sin"} & want.keys():
            gap = float(np.abs(want[key] - batch[key]).max()) if batch[key].size else 0.0
            if gap > len(batch[key]) * 2.0**-22:
                self._say(step, f"{key} of rotary positions is off by {gap:.1e} from {self.other.engine}'s")

    def _gradients(self, want: Mapping[str, Array], got: Mapping[str, Array], step: int) -> None:
        names = [key for key in want if key.startswith("raw/")]
        sizes = {key: _largest(want[key]) for key in names}
        most = max(sizes.values(), default=0.0)
        for key in sorted({*names, *(key for key in got if key.startswith("raw/"))}):
            if key not in want or key not in got:
                side = self.other.name if key not in want else self.answer.name
                self.errors["grad"] = math.inf
                self._say(step, f"{key} is missing under {side}")
                continue
            # A gradient that is nothing but rounding is counted over the largest of the model, as in all proofs.
            floor = most if sizes[key] <= BOUND * most else 0.0
            self._take("grad", key, got[key], want[key], floor, step)

    def _update(self, got: Mapping[str, Array], step: int) -> None:
        """Clipped gradients, parameters and moments follow from the answer's own gradients by NumPy's formulas."""
        if "lr" not in got:
            return
        raw = {key.removeprefix("raw/"): x for key, x in got.items() if key.startswith("raw/")}
        before = self.question.before(step)
        raw = {name: grad for name, grad in raw.items() if f"model/{name}" in before}
        law = stepped(law_of(self.question), before, raw, float(got["lr"][0]), step)
        for key, want in law.items():
            if key in got:
                self._take(_KIND_OF[key.partition("/")[0]], key, got[key], want, 0.0, step)

    def _take(self, kind: str, name: str, got: Array, want: Array, floor: float, step: int) -> None:
        gap = np.abs(got - want)
        worst = float(gap.max()) if gap.size else 0.0
        scale = max(_largest(want), floor)
        error = 0.0 if not worst else worst / scale if scale else math.inf
        error = math.inf if error != error else error
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        if error > BOUND:
            at = [int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape)]
            where = f" of its largest entry at {at}" if gap.size > 1 else ""
            self._say(step, f"{name} is off by {error:.1e}{where} from {self.other.engine}'s")

    def _say(self, step: int, text: str) -> None:
        self.first = self.first or f"step {step + 1}: {text}"


def _largest(x: Array) -> float:
    return float(np.abs(x).max()) if x.size else 0.0


@dataclass(frozen=True)
class AnswerTable:
    """All answers of one question. answers: each engine's one device among them."""

    question: EngineQuestion
    answers: Sequence[EngineAnswer]

    @cached_property
    def rows(self) -> list[EngineRow]:
        """A row for each answer but torch's one device, which stands in the rows of the others."""
        alone = [answer for answer in self.answers if answer.alone]
        rows = []
        for answer in self.answers:
            others = [other for other in alone if other.engine != answer.engine]
            if answer.engine != "torch" and not answer.alone:
                others = alone
            if others and not (answer.alone and answer.engine == "torch"):
                rows.append(self._row(answer, others))
        return rows

    def _row(self, answer: EngineAnswer, others: Sequence[EngineAnswer]) -> EngineRow:
        compared = [_Comparison(self.question, other, answer).run() for other in others]
        errors = {
            kind: max(c.errors[kind] for c in compared if kind in c.errors)
            for kind in KINDS
            if any(kind in c.errors for c in compared)
        }
        first = next((c.first for c in compared if c.first), None)
        against = tuple(other.engine for other in others)
        return EngineRow(answer.engine, answer.plan, answer.ranks, against, errors, BOUND, first)

    def odd(self) -> Iterator[str]:
        """The engine whose one device differs from all others, which agree with each other; there must be three."""
        alone = [answer for answer in self.answers if answer.alone]
        agree = {
            (a.engine, b.engine): _Comparison(self.question, a, b).run().first is None
            for i, a in enumerate(alone)
            for b in alone[i + 1 :]
        }
        for answer in alone:
            mine = [same for pair, same in agree.items() if answer.engine in pair]
            rest = [same for pair, same in agree.items() if answer.engine not in pair]
            if rest and all(rest) and not any(mine):
                yield answer.engine

"""`Plan`: a frozen value and, equally, a line of `key=value` words that round-trips.

dp=2 shard=2 zero=3 pp=2 tp=2 schedule=1f1b micros=8 sync=every_step codec=plain precision=bf16
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from unisono.plan import checks
from unisono.plan.batch import Batch
from unisono.plan.blocks import text_problems
from unisono.plan.checks import Devices, RecipeLike
from unisono.plan.fields import OPTIONED, USUAL, PlanFields
from unisono.plan.grammar import KEYS, NAMED, SIZES, size_problem, value_problems
from unisono.plan.grid import grid_of
from unisono.plan.options import options_problem
from unisono.spec.elsewhere import remedy_for
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.words import nearest

__all__ = ["Batch", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanFields):
    """How a run is spread. World size is dp * shard * pp * cp * tp, axes from outer to inner pp, dp, shard, cp, tp.

    dp: replicas, or -1: as many as fill the world. shard, zero: what is sharded inside a replica's data axis.
    tp: a number, or a `Grid` of ranks in rows and columns, `2x2`.
    micros: micro-batches of a step on one data rank; None until derived from the batch.
    blocks: ranges of blocks that are played otherwise than the other keys say, see `plan.blocks`.
    options: what stands behind a value of `zero`, `tp` or `precision`, as it is written: `zero=3:wire=int8`.
    said: the keys that the text named, so that "fp32 by default" and "fp32 on purpose" can be told apart; and `auto`.

    Raises ConfigProblems, with everything that is wrong, when a value is not in the contract.
    """

    def __post_init__(self) -> None:
        problems = _problems(
            {key: self.text(key) if key in OPTIONED else getattr(self, key) for key in KEYS}, "plan"
        )
        if problems:
            raise ConfigProblems(problems)
        texts = {key: self.text(key) for key in OPTIONED}
        if any(":" in str(getattr(self, key)) for key in OPTIONED) or self.options:
            for key, text in texts.items():
                word = str(text).partition(":")[0]
                object.__setattr__(self, key, _value(key, word))
            kept = frozenset(f"{key}={text}" for key, text in texts.items() if ":" in str(text))
            object.__setattr__(self, "options", kept)

    @classmethod
    def parse(cls, text: str, where: str = "plan") -> Self:
        """Reads a plan's text; `where` names its source in messages. Raises ConfigProblems."""
        words = text.split()
        if re.search(r"\w\s*\s=|=\s+\w", text):
            what, fix = (
                "blanks stand around '=', and they separate the words of a plan",
                re.sub(r"\s*=\s*", "=", text),
            )
            raise ConfigProblems([Problem("P05", what, where, f'"{fix}"')])
        auto = frozenset(("auto",) if "auto" in words else ())
        values, problems = _read([word for word in words if word != "auto"], where)
        problems += _problems(values, where)
        if problems:
            raise ConfigProblems(problems)
        return cls(**values, said=frozenset(values) | auto)

    @property
    def auto(self) -> bool:
        """Whether the planner is to choose what the text does not name; see `verbs.train.planning`."""
        return "auto" in self.said

    def __str__(self) -> str:
        changed = [key for key in KEYS if self.text(key) != DEFAULTS[key]]
        if not any(key in ("dp", "shard", "pp", "tp", "cp") for key in changed):
            changed = ["dp", *changed]
        return " ".join(f"{key}={self.text(key)}" for key in changed)

    def fill(self, world: int | None) -> Self:
        """The plan with dp=-1 replaced by what fills `world` ranks. Raises UsageError when it cannot."""
        if self.dp != -1 or world is None:
            return self
        if world < self.inner or world % self.inner:
            raise UsageError(
                f"dp=-1 cannot fill {world} ranks: a replica takes shard*pp*cp*tp = {self.inner} ranks",
                where="plan.dp, launch.ranks",
                fix=f"a number of ranks that is a multiple of {self.inner}",
                code="P14",
            )
        return replace(self, dp=world // self.inner)

    def idle(self) -> list[str]:
        """What the text says and nothing follows from: `schedule=zbv says nothing with pp=1`."""
        return [
            f"{key}={self.text(key)} says nothing with {axis}=1"
            for key, axis in _AXES.items()
            if key in self.said and getattr(self, axis) == 1
        ]

    def check(self, recipe: RecipeLike | None = None, cluster: Devices | None = None) -> list[Problem]:
        """All problems at once: not in this version, meaningless, not fitting the recipe or the cluster."""
        return checks.check(self, recipe, cluster)


_AXES = {"zero": "shard", "schedule": "pp", "cp_kind": "cp", "collective": "dp"}
"""Keys that say how an axis is played, and that axis."""
_LINK = "blanks separate the words of a plan: a path without any, or a link that has none: ln -s"
DEFAULTS: dict[str, Any] = {key: getattr(USUAL, key) for key in KEYS}


def _read(words: Iterable[str], where: str) -> tuple[dict[str, Any], list[Problem]]:
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            what = f"{word!r} is not of the form key=value"
            known = word.partition(":")[0] in KEYS and word not in KEYS
            example = word.replace(":", "=", 1) if known else "dp=2 pp=2 micros=8"
            fix = _LINK if ".py:" in word else remedy_for(word) or f'for example "{example}"'
            problems.append(Problem("P05", what, where, fix))
        elif (
            key != "blocks"
            and len(parts := re.split("[,;](?=[a-z_]+=)", word)) > 1
            and all(p.partition("=")[0] in KEYS for p in parts)
        ):
            what = f"{word!r}: the words of a plan are separated by blanks"
            problems.append(Problem("P05", what, where, f'"{" ".join(parts)}"'))
        elif key not in KEYS:
            near, remedy = nearest(key, KEYS), remedy_for(key)
            hint = f"; did you mean {near}?" if near and not (remedy and near[0] != key[0]) else ""
            fix = remedy if remedy and not hint else f"keys of a plan: {' '.join(KEYS)}"
            problems.append(Problem("P01", f"unknown plan key {key}{hint}", where, fix))
        elif key in values:
            what = f"{key} is given twice: {key}={values[key]} and {word}"
            problems.append(Problem("P02", what, where, "keep one of them"))
        else:
            values[key] = _value(key, value)
    return values, problems


def _value(key: str, text: str) -> int | str:
    """Read a word's value as the plan's field holds it."""
    return (grid_of(text) if key == "tp" else None) or (_number(text) if key in SIZES else text)


def _number(text: str) -> int | str:
    digits = text.removeprefix("-")
    return int(text[:20]) if digits.isascii() and digits.isdigit() else text


def _problems(values: dict[str, Any], where: str) -> list[Problem]:
    def each() -> Iterable[Problem]:
        for key, value in values.items():
            if key in OPTIONED and (problem := options_problem(key, str(value), where)):
                yield problem
                continue
            if key in OPTIONED and ":" in str(value):
                value = _value(key, str(value).partition(":")[0])
            if key in NAMED:
                yield from value_problems(key, value, where)
            elif key == "blocks":
                yield from text_problems(value, where)
            elif problem := size_problem(key, value, where):
                yield problem

    return list(each())

"""What a sweep's file says: which recipe, how it is searched, and over which values.

[sweep]
recipe = "digits.toml"       # beside this file
method = "asha"              # with the method's options as keys: eta = 3
trials = 16
metric = "val_loss"

[sweep.space]
"train.lr" = {low = 1e-4, high = 1e-1, log = true}
"train.optimizer" = ["adamw", "sgd"]
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono import config
from unisono.config import Loaded
from unisono.config.fields import keys, suggestion
from unisono.config.layers import Flag
from unisono.config.toml import faults, key_lines, line_of
from unisono.spec.doubtful import TEXT, read_text, toml_of
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.runs import FIXED
from unisono.spec.training import Count, Natural
from unisono.spec.words import meant
from unisono_contrib.sweep.methods import METHODS, SearchMethod
from unisono_contrib.sweep.progress import SweepProgress
from unisono_contrib.sweep.space import Dimension, Interval, OneOf, Params, Space, drawn

_BOUNDS = ("low", "high", "log", "points")


class SweepConfig(BaseModel):
    """The keys of `[sweep]` that belong to no method."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recipe: str = Field(min_length=1, description="the recipe's file, beside the sweep's")
    method: str = Field(default="random", description=METHODS.listed())
    trials: Count = Field(default=16, description="how many runs; a grid has as many as combinations")
    workers: Count | None = Field(
        default=None, description="trials at a time; as many as this machine has cores for when absent"
    )
    metric: str = Field(
        default="val_loss", description="what is compared: val_loss, loss, or a metric's name"
    )
    goal: Literal["min", "max"] | None = Field(
        default=None, description="min or max; max for an accuracy or a speed, min for all else when absent"
    )
    retries: Natural = Field(default=2, description="how often a trial that failed is tried again")
    seed: Natural = Field(default=0, description="of the values that are drawn")
    space: dict[str, Any] = Field(default_factory=dict, description="keys of the recipe and their values")


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """A sweep as read. origin: the file. flags: what the command line sets in all trials."""

    config: SweepConfig
    method: SearchMethod
    space: Space
    base: Loaded
    recipe: Path
    origin: Path
    flags: tuple[Flag, ...]
    environ: Mapping[str, str]

    @property
    def goal(self) -> str:
        """min or max."""
        greater = self.config.metric.endswith(("accuracy", "_per_s"))
        return self.config.goal or ("max" if greater else "min")

    @property
    def progress(self) -> SweepProgress:
        """That of a sweep that has not begun."""
        train, said = self.base.recipe.train, self.config
        return SweepProgress(
            self.space, train.steps, said.trials, said.seed, self.goal, train.lr, train.global_batch
        )

    def loaded(self, params: Params, more: Sequence[Flag] = ()) -> Loaded:
        """The recipe with a trial's values. more: keys that count more. Raises ConfigProblems."""
        trial: list[Flag] = [(key, text(value)) for key, value in params.items()]
        return config.load(self.recipe, [*self.flags, *trial, *more], environ=self.environ)

    def identity(self) -> dict[str, Any]:
        """All that must be the same where a sweep goes on."""
        said = self.config.model_dump(exclude={"trials", "workers", "retries", "recipe"})
        recipe = self.base.recipe.model_dump(mode="json", exclude={"launch"})
        return {**said, "options": self.method.model_dump(), "base": recipe, "plan": str(self.base.plan)}


def read(file: Path, flags: Sequence[Flag], environ: Mapping[str, str], **changed: Any) -> SweepSpec:
    """A sweep's file, its recipe with `flags`, and what the command line changes in `[sweep]`. Raises ConfigProblems
    with all that is wrong."""
    source = _text(file)
    table, lines = toml_of(source), key_lines(source)
    problems: list[Problem] = []

    def where(*key: str) -> str:
        line = line_of(lines, ("sweep", *key))
        return f"{file}:{line}" if line else str(file)

    said = table.get("sweep")
    if not isinstance(said, dict) or len(table) > 1:
        other = next((key for key in table if key != "sweep"), "")
        what = f"a sweep's file has one section, [sweep]{f', and no {other}' if other else ''}"
        raise ConfigProblems(
            [Problem("C01", what, str(file), "[sweep] with recipe, method and [sweep.space]")]
        )
    said = _changed(said, {key: value for key, value in changed.items() if value is not None})
    method, rest = _method(said, where("method"))
    sweep = _validated(rest, method, where)
    space = _space(sweep.space, where, problems)
    if problems:
        raise ConfigProblems(problems)
    recipe = file.parent / sweep.recipe
    base = config.load(recipe, flags, environ=environ)
    spec = SweepSpec(sweep, method, space, base, recipe, file, tuple(flags), environ)
    if wrong := [*_misfits(spec, where)]:
        raise ConfigProblems(wrong)
    config.resolve(*_parts(spec.loaded(drawn(space, sweep.seed, 0))))
    return spec


def _parts(loaded: Loaded) -> tuple[Any, ...]:
    return loaded.recipe, loaded.plan, None, loaded.origins


def _text(file: Path) -> str:
    try:
        source = read_text(file, TEXT)
        toml_of(source)
        return source
    except tomllib.TOMLDecodeError:
        raise ConfigProblems(
            [Problem("C03", f"not TOML: {what}", f"{file}:{line}", fix) for line, what, fix in faults(source)]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"cannot read the sweep {file}: {what}",
            where=str(file),
            fix="unisono sweep FILE.toml",
            code="C03",
        ) from error


def _changed(said: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """`[sweep]` with what the command line says; options of a method that it replaces mean nothing any more."""
    before = str(said.get("method"))
    replaced = changed.get("method", before) != before and before in METHODS.names()
    idle = {*METHODS.find(before).model_fields} if replaced else set[str]()
    return {key: value for key, value in said.items() if key not in idle} | {**changed}


def _method(said: Mapping[str, Any], where: str) -> tuple[SearchMethod, dict[str, Any]]:
    """The method with its options, and the keys that are not its own. Raises UsageError."""
    name = said.get("method", SweepConfig.model_fields["method"].default)
    method = METHODS.among(str(name), said, where)
    return method, {key: value for key, value in said.items() if key not in type(method).model_fields}


def _validated(said: Mapping[str, Any], method: SearchMethod, where: Any) -> SweepConfig:
    try:
        return SweepConfig.model_validate(said)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            key = str(item["loc"][0])
            known = [*SweepConfig.model_fields, *type(method).model_fields]
            if item["type"] == "extra_forbidden":
                what = f"unknown key sweep.{key} of method {method.name}{meant(key, known)}"
                problems.append(Problem("C01", what, where(key), f"keys: {' '.join(known)}"))
            else:
                field = SweepConfig.model_fields[key]
                problems.append(
                    Problem("C02", f"sweep.{key}: {item['msg'].lower()}", where(key), field.description or "")
                )
        raise ConfigProblems(problems) from None


def _space(said: Mapping[str, Any], where: Any, problems: list[Problem]) -> Space:
    """The dimensions by key; what is wrong goes to `problems`."""
    space: dict[str, Dimension] = {}
    for key, value in said.items():
        place = where("space", key)
        if key not in keys() and not key.startswith("model."):
            near = suggestion(key)
            problems.append(
                Problem("C01", f"unknown key {key}{f'; did you mean {near}?' if near else ''}", place,
                        'a key of the recipe, in quotes: "train.lr"')
            )  # fmt: skip
            continue
        try:
            space[key] = dimension(value)
        except ValueError as error:
            fix = f'"{key}" = {{low = 1e-4, high = 1e-1, log = true}}, or a list'
            problems.append(Problem("C02", f"{key}: {error}", place, fix))
    if not said:
        problems.append(
            Problem(
                "C02",
                "there is nothing to search",
                where("space"),
                '[sweep.space] with "train.lr" = [0.01, 0.1]',
            )
        )
    return space


def dimension(value: Any) -> Dimension:
    """A dimension of a space as TOML says it. Raises ValueError."""
    if isinstance(value, list):
        if not value:
            raise ValueError("the list is empty")
        return OneOf(tuple(value))
    if not isinstance(value, dict):
        raise ValueError("should be a list, or {low, high}")
    if strange := [key for key in value if key not in _BOUNDS]:
        raise ValueError(f"{strange[0]} is no word of an interval{meant(strange[0], _BOUNDS)}")
    low, high, log, points = (
        value.get(key, default) for key, default in zip(_BOUNDS, (None, None, False, 0))
    )
    if not all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in (low, high)):
        raise ValueError("low and high should be numbers")
    if not low < high:
        raise ValueError(f"low = {low} should be below high = {high}")
    if log and low <= 0:
        raise ValueError(f"low = {low} has no logarithm")
    if not isinstance(points, int) or points < 0:
        raise ValueError("points should be a whole number above 0")
    whole = isinstance(low, int) and isinstance(high, int)
    return Interval(low, high, bool(log), whole, points)


def _misfits(spec: SweepSpec, where: Any) -> Any:
    """What the method cannot search."""
    method = spec.method
    if why := method.misfit(spec.progress):
        yield Problem("C06", why, where("method"), f"method {method.name}, another space or another method")
    for key in spec.space:
        place = where("space", key)
        if method.pieces and key == "train.steps":
            what = f"method {method.name} compares trials at equal steps, and train.steps is searched"
            yield Problem("C06", what, place, 'take it out of the space, or method = "random"')
        if method.resumes and any(
            key == fixed or key.startswith(f"{fixed}.") for fixed in (*FIXED, "plan", "name")
        ):
            what = f"method {method.name} changes values of a run that has trained, and {key} must stay"
            yield Problem("C06", what, place, 'method = "random", "asha" or "tpe"')


def with_workers(spec: SweepSpec, workers: int) -> SweepSpec:
    """The sweep with so many trials at a time."""
    return replace(spec, config=spec.config.model_copy(update={"workers": workers}))


def text(value: Any) -> str:
    """A value as a flag says it: what `config` reads back as the same."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(text, value))
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)

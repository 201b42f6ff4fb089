"""From layers to a checked (recipe, plan): every problem at once, each with the place where it was made."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from unisono.config.fields import SECTIONS, key_of, keys
from unisono.config.layers import (
    MANY,
    Flag,
    Layer,
    Setting,
    Words,
    env_layer,
    file_layer,
    flag_layer,
    put_text,
    unknown,
)
from unisono.config.models import Recipe
from unisono.config.toml import toml
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.finder import executed
from unisono.spec.frames import of_user
from unisono.spec.model import kind_of
from unisono.spec.runs import CONFIG, run_folder
from unisono.spec.words import meant


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe and its plan as given, before the plan is held against the recipe; origins by dotted key."""

    recipe: Recipe
    plan: Plan
    origins: Mapping[str, str]


def load(
    source: "str | os.PathLike[str] | None" = None,
    flags: Sequence[Flag] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    base: "Recipe | tuple[Recipe, Plan] | None" = None,
    base_origin: str = "recipe",
) -> Loaded:
    """Puts the layers together: defaults < `base` < `source` (FILE.toml or FILE.py:FUNCTION) < `environ` < `flags`.

    environ: the variables to look at, most likely os.environ; none unless given.
    Raises ConfigProblems with all that is wrong, UserCodeError when a recipe function raises.
    """
    problems: list[Problem] = []
    layer: Layer = {}
    if base is not None:
        layer |= _value_layer(base, base_origin)
    if source is not None:
        layer |= _source_layer(str(source), problems)
    unread = len(problems) if not layer else 0
    layer |= env_layer(environ, problems)
    layer |= flag_layer(flags, problems)
    _settle_own(layer, problems)
    origins = {name: setting.origin for name, setting in layer.items()}
    recipe = _validate(layer, problems)
    plan = _plan(layer, problems)
    if problems or recipe is None or plan is None:
        raise ConfigProblems(problems[:unread] if unread else problems)
    return Loaded(recipe, plan, {**dict.fromkeys(keys(), "default"), **origins})


def _settle_own(layer: Layer, problems: list[Problem]) -> None:
    """Keys of `[model]` that none of our kinds has: values for a user's own kind that has them, else problems."""
    strange = [name for name in layer if name.startswith("model.") and name not in keys()]
    if not strange:
        return
    keys_of_kind: Mapping[str, Any] = {}
    with suppress(UsageError):  # of a kind of model that there is not: told where the recipe is made
        keys_of_kind = kind_of(str(layer.get("model.kind", Setting("gpt", "")).value)).model_fields
    for name in strange:
        value, origin = layer[name].value, layer[name].origin
        field = keys_of_kind.get(name.partition(".")[2])
        if field is None:
            if len(problems) < MANY:
                problems.append(unknown(name, origin))
            del layer[name]
        elif isinstance(value, Words):
            del layer[name]
            put_text(layer, key_of(name, field), value, origin, problems)


def _source_layer(source: str, problems: list[Problem]) -> Layer:
    path, colon, name = source.rpartition(":")
    if colon and path.endswith(".py") and not Path(source).exists():
        return _value_layer(call(Path(path), name), source)
    if source.endswith(".py"):
        fix = f"{source}:FUNCTION, a function that returns (Recipe, Plan)"
        problems.append(Problem("C03", f"{source} is Python, but no function is named", source, fix))
        return {}
    if Path(source).is_dir():
        with suppress(UsageError):  # told below: a recipe's file is as good as a run
            run = run_folder(source) / CONFIG  # as export and --resume take it
            if run.exists():
                return file_layer(run, problems)
        problems.append(
            Problem(
                "C03", f"{source} is a folder without {CONFIG}", source, "name a recipe file or a run folder"
            )
        )
        return {}
    return file_layer(Path(source), problems)


def call(path: Path, name: str) -> Any:
    """Runs FUNCTION of FILE.py and returns (Recipe, Plan) or a Recipe. Raises UsageError, UserCodeError."""
    where = f"{path}:{name}"
    module = _guarded(where, lambda: executed(path, f"unisono_recipe_{path.stem}", where))
    function = getattr(module, name, None)
    if not callable(function):
        names = [
            n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__
        ]
        fix = f"functions there: {' '.join(names) or 'none'}"
        raise UsageError(
            f"{path} has no function {name}{meant(name, names)}", where=where, fix=fix, code="C03"
        )
    value = _guarded(where, function)
    pair = value if isinstance(value, tuple) else (value, None)
    if len(pair) == 2 and isinstance(pair[0], Recipe) and isinstance(pair[1], (Plan, str, type(None))):
        return value
    raise UsageError(
        f"{name} returned {type(value).__name__}, not (Recipe, Plan)",
        where=where,
        fix="return unisono.Recipe(...), unisono.Plan(...)",
        code="C03",
    )


def _guarded(where: str, function: Any) -> Any:
    try:
        return function()
    except (UsageError, ValidationError) as error:
        if isinstance(error, UsageError):
            raise
        raise ConfigProblems(_pydantic(error, {}, where)) from None
    except (Exception, SystemExit) as error:
        raise of_user(error, "the recipe function", where) from error


def _value_layer(value: Any, origin: str) -> Layer:
    recipe, plan = value if isinstance(value, tuple) else (value, None)
    layer: Layer = {}
    for name, values in recipe.model_dump(exclude_unset=True).items():
        if name in SECTIONS:
            layer |= {f"{name}.{leaf}": Setting(inner, origin) for leaf, inner in (values or {}).items()}
        else:
            layer[name] = Setting(values, origin)
    if plan is not None:
        layer["plan"] = Setting(str(plan), origin)
    return layer


def _validate(layer: Layer, problems: list[Problem]) -> Recipe | None:
    nested: dict[str, Any] = {}
    for name, setting in layer.items():
        section, dot, leaf = name.partition(".")
        if dot:
            nested.setdefault(section, {})[leaf] = setting.value
        else:
            nested[name] = setting.value
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        problems += _pydantic(error, layer, "")
    except UsageError as error:  # of a kind of model that there is not
        where = layer["model.kind"].origin if "model.kind" in layer else error.where
        problems.append(Problem(error.code, error.what, where, error.fix))
    return None


def _pydantic(error: ValidationError, layer: Layer, origin: str) -> list[Problem]:
    problems, items = [], error.errors(include_url=False)
    either = [item for item in items if len(item["loc"]) > 2]  # of a word or something else
    words = {item["loc"][:2] for item in either if item["type"] == "literal_error"}
    patterns = {item["loc"][:2] for item in either if item["type"] == "string_pattern_mismatch"}
    for item in items:
        loc, of = [str(p) for p in item["loc"]], item["loc"][:2]
        if len(loc) > 2 and item["type"] == "literal_error" and of not in patterns:
            continue  # of a number or a word: the number is what is said
        if len(loc) > 2 and item["type"] == "string_pattern_mismatch" and of in words:
            continue  # of a word, or of one with options: the words are what is said
        name = ".".join(loc[:2]) if loc and loc[0] in SECTIONS else ".".join(loc[:1])
        setting = layer.get(name)
        if item["type"] == "extra_forbidden" and loc[0] == "model" and name in keys():
            kind = layer.get("model.kind", Setting(keys()["model.kind"].default, "")).value
            what = f"{name} means nothing to a model of kind {kind}"
            problems.append(Problem("C06", what, setting.origin if setting else origin, "take it out"))
            continue
        written = setting.value if setting else item.get("input")
        value, message = _shown(written), _in_words(item)
        fix = keys()[name].about if name in keys() else ""
        if item["type"] == "string_pattern_mismatch" and name == "name":
            named = re.sub(r"[^A-Za-z0-9]+", "-", str(written)).strip("-")
            fix = f'{name} = "{named or "run"}"; {fix}'
        what = (
            f"{name or error.title} = {value} {message}"
            if "should" in message
            else f"{name} = {value}: {message}"
        )
        problems.append(Problem("C02", what, setting.origin if setting else origin, fix))
    return problems


def _in_words(item: Any) -> str:
    """What pydantic says of a value, without its own words."""
    if item["type"] == "string_pattern_mismatch":
        if item["loc"] == ("name",):
            return "should be letters, digits, '.', '_' or '-', and begin with a letter or a digit: it names a folder"
        return "should be one of those below"
    if item["type"] == "missing":
        return "should have one value more"
    return re.sub(r"^(Input|String|Tuple|List) should", "should", item["msg"])


def _shown(value: Any) -> str:
    try:
        return toml(value)
    except TypeError:
        return str(value)


def _plan(layer: Layer, problems: list[Problem]) -> Plan | None:
    setting = layer.get("plan", Setting(keys()["plan"].default, "default"))
    if not isinstance(setting.value, str):
        return None
    if not setting.value.strip():
        problems.append(Problem("P05", "the plan is empty", setting.origin, 'plan = "dp=1" is one process'))
        return None
    try:
        return Plan.parse(setting.value, where=setting.origin)
    except ConfigProblems as error:
        problems += error.problems
        return None

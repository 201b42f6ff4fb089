"""Pipeline schedules, one a file: each has `timetable(ranks, micros) -> Timetable`, found by its name.

The contract's name is the module's name; a name that starts with a digit is spelt out (`1f1b` is `one_f_one_b`).
Options follow colons and become keyword arguments (`interleaved:v=2`).
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable

from unisono.programs.pipeline import Timetable
from unisono.spec.errors import UsageError

Schedule = Callable[[int, int], Timetable]

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def module_of(name: str) -> str:
    """The module's name for a contract name: `1f1b` -> `one_f_one_b`, others unchanged."""
    if not name[:1].isdigit():
        return name
    return "_".join(_DIGITS[int(c)] if c.isdigit() else c for c in name)


def name_of(module: str) -> str:
    """The contract's name of a module: `one_f_one_b` -> `1f1b`, others unchanged."""
    words = module.split("_")
    if words[0] not in _DIGITS:
        return module
    return "".join(str(_DIGITS.index(word)) if word in _DIGITS else word for word in words)


def names() -> list[str]:
    """The contract names of the schedules that exist."""
    return sorted(name_of(module.name) for module in pkgutil.iter_modules(__path__))


def get(text: str) -> Schedule:
    """The schedule of a plan's `schedule=` value. Raises UsageError for a name or option that does not exist."""
    name, *options = [
        part for part in text.split(":") if not part.startswith("cut=")
    ]  # says which blocks, not when
    if name not in names():
        raise UsageError(f"there is no pipeline schedule {name!r}", fix=f"one of: {', '.join(names())}")
    schedule: Schedule = importlib.import_module(f"{__name__}.{module_of(name)}").timetable
    keywords: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if not (key.isidentifier() and value.isdigit()):
            raise UsageError(f"schedule option {option!r} is not KEY=NUMBER", where=f"schedule={text}")
        if key not in _options(schedule):
            takes = ", ".join(_options(schedule)) or "none"
            raise UsageError(
                f"schedule {name} takes no option {key}",
                where=f"schedule={text}",
                fix=f"its options: {takes}",
            )
        keywords[key] = int(value)
    return functools.partial(schedule, **keywords) if keywords else schedule


def _options(schedule: Schedule) -> list[str]:
    """The whole numbers that a plan may give a schedule, beside those that it always gives."""
    parameters = inspect.signature(schedule).parameters.values()
    return [p.name for p in parameters if p.annotation is int and p.default is not p.empty]

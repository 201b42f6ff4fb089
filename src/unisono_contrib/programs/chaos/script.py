"""A script of faults, read: TOML, JSON lines, words on the command line, or drawn at random from a seed. No torch.

--chaos faults.toml
--chaos "kill:who=2:step=10:phase=update stop:who=0:step=20"
--chaos random:seed=3:faults=20:kinds=kill,stop,cut
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from unisono.spec.doubtful import TEXT, read_text, toml_of
from unisono.spec.errors import ConfigProblems, Problem, UsageError
from unisono.spec.words import meant, whole
from unisono_contrib.programs.chaos.fault import ABOVE, ANY, FAULTS, IN_STEP, PARTS, PHASES, SUPERVISOR, Fault

DRAWN = ("kill", "stop", "cut")
"""Kinds of a random script that names none."""
_NUMBERS = {
    "after": (0.0, 1e9),
    "late": (0.0, 60.0),
    "seconds": (-1e9, 1e9),
    "times": (1.0, 1e4),
    "leaf": (0.0, 60.0),
    "mib": (1.0, 4096.0),
    "drift": (-1e6, 1e6),
}
_TEXTS = {"part": PARTS, "module": ()}
_WHOLE = {"step": (1, 10**9), "bit": (0, 62)}
_LAUNCHER = "launcher"  # what older scripts call the supervisor
_TABLE = re.compile(r"^\s*\[\[\s*fault\s*\]\]")

Row = tuple[str, dict[str, Any], dict[str, str]]
"""Where a fault is written, what is said of it, and where each key stands if that is known better."""


@dataclass(frozen=True, slots=True)
class Script:
    """The faults of one run, each with its rank."""

    faults: tuple[Fault, ...]

    @property
    def digest(self) -> str:
        """Eight letters by which this script is known again in a run's history."""
        return hashlib.blake2b(self.as_text().encode(), digest_size=4).hexdigest()

    def as_text(self) -> str:
        """As it crosses to ranks: JSON."""
        return json.dumps([fault.as_json() for fault in self.faults])

    @classmethod
    def of_text(cls, text: str) -> Self:
        """What `as_text` made."""
        return cls(tuple(Fault(**said) for said in json.loads(text)))


def read(text: str, ranks: int, steps: int) -> Script:
    """The script that `--chaos text` means for a run of so many ranks and steps. Raises UsageError, ConfigProblems."""
    word = (text.split(":", 1)[0].split() or [""])[0]
    if word == "random":
        return _drawn(text, ranks, steps)
    # `explode:who=1` is a fault misspelt, not a file; the name of a file has an ending, or lies in a folder.
    is_inline = not os.path.isfile(text) and (word in FAULTS or not re.search(r"[./\\]", word))
    rows = list(_words(text) if is_inline else _file(Path(text)))
    problems: list[Problem] = []
    faults = [fault for row in rows if (fault := _fault(row, ranks, steps, problems)) is not None]
    if not rows:
        problems.append(Problem("C30", "no fault in it", text, "[[fault]] and its keys, see docs/chaos.md"))
    if problems:
        raise ConfigProblems(problems)
    return Script(_dealt(faults, ranks, seed=0))


def _dealt(faults: Sequence[Fault], ranks: int, seed: int) -> tuple[Fault, ...]:
    """Ranks for those that may befall any: the same each time."""
    drawn = random.Random(seed)
    return tuple(replace(f, who=drawn.randrange(ranks)) if f.who == ANY else f for f in faults)


def _drawn(text: str, ranks: int, steps: int) -> Script:
    """`random:seed=3:faults=20:kinds=kill,stop`: faults in as many steps, between the second and the last."""
    said, where = {"seed": "0", "faults": "5", "kinds": ",".join(DRAWN)}, f"--chaos {text}"
    for part in text.split(":")[1:]:
        key, _, value = part.partition("=")
        if key not in said:
            raise UsageError(f"a random script has no key {key}{meant(key, said)}", where=where,
                             fix="random:seed=3:faults=20:kinds=kill,stop,cut", code="C30")  # fmt: skip
        said[key] = value
    kinds = said["kinds"].split(",")
    for kind in kinds:
        if kind not in FAULTS:
            raise UsageError(f"no fault is called {kind}{meant(kind, FAULTS)}", where=where,
                             fix=", ".join(FAULTS), code="C30")  # fmt: skip
    seed, count = whole(said["seed"]), whole(said["faults"])
    if seed is None or count is None:
        raise UsageError(
            "seed and faults are whole numbers", where=where, fix="random:seed=3:faults=20", code="C30"
        )
    if not 0 < count <= steps - 2:
        raise UsageError(f"{count} faults in {steps} steps: each takes a step of its own, not the first or last",
                         where=where, fix=f"faults={max(1, steps // 2)}, or more steps", code="C30")  # fmt: skip
    drawn = random.Random(seed)
    at = sorted(drawn.sample(range(2, steps), count))
    return Script(tuple(_any(drawn, drawn.choice(kinds), step, ranks) for step in at))


def _any(drawn: random.Random, what: str, step: int, ranks: int) -> Fault:
    """One fault at a moment of a step; half of them at no moment in particular, some milliseconds later."""
    late = round(drawn.uniform(0.0, 0.02), 4) if drawn.random() < 0.5 else 0.0
    whom = [*range(ranks), *(ABOVE if FAULTS[what].loses and FAULTS[what].processes else ())]
    fault = Fault(what, drawn.choice(whom), step, phase=drawn.choice(IN_STEP), late=late)
    return replace(fault, **_defaults(what))


def _defaults(what: str) -> dict[str, Any]:
    return {key: type(getattr(Fault(what), key))(value) for key, value in FAULTS[what].options.items()}


# Where faults are written.


def _words(text: str) -> Iterator[Row]:
    for word in text.split():
        what, *parts = word.split(":")
        said: dict[str, Any] = {"what": what}
        for part in parts:
            key, _, value = part.partition("=")
            said[key] = _value(value)
        yield f"--chaos {word}", said, {}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _file(path: Path) -> Iterator[Row]:
    try:
        text = read_text(path, TEXT)
    except (OSError, ValueError) as error:
        said = f"no script of faults: {error.strerror if isinstance(error, OSError) else 'no text'}"
        raise UsageError(
            said,
            where=str(path),
            fix=f"a file, random:seed=3, or faults in words: {' '.join(FAULTS)}",
            code="C30",
        ) from error
    yield from _lines(path, text) if text.lstrip().startswith("{") else _tables(path, text)


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"no JSON: {error}", where=f"{path}:{number}", code="C30") from error
        yield f"{path}:{number}", said if isinstance(said, dict) else {"what": said}, {}


def _tables(path: Path, text: str) -> Iterator[Row]:
    try:
        document = toml_of(text)
    except ValueError as error:
        line = re.search(r"line (\d+)", str(error))
        raise UsageError(
            f"no TOML: {error}", where=f"{path}:{line[1]}" if line else str(path), code="C30"
        ) from error
    if extra := set(document) - {"fault"}:
        raise UsageError(
            f"unknown key {min(extra)}", where=str(path), fix="[[fault]], once a fault", code="C30"
        )
    tables = document.get("fault", [])
    starts, lines = [], text.splitlines()
    starts = [i for i, line in enumerate(lines) if _TABLE.match(line)]
    for number, said in enumerate(tables if isinstance(tables, list) else []):
        begin = starts[number] if number < len(starts) else 0
        end = starts[number + 1] if number + 1 < len(starts) else len(lines)
        keys = {
            match[1]: f"{path}:{i + 1}"
            for i in range(begin, end)
            if (match := re.match(r"^\s*([\w-]+)\s*=", lines[i]))
        }
        yield f"{path}:{begin + 1}", said, keys


# What may be said.


def _fault(row: Row, ranks: int, steps: int, problems: list[Problem]) -> Fault | None:
    """The fault that a row says, or None with what is wrong with it among `problems`."""
    where, said, keys = row
    before = len(problems)

    def wrong(key: str, what: str, fix: str = "") -> None:
        problems.append(Problem("C30", what, keys.get(key, where), fix))

    what = said.get("what")
    if not isinstance(what, str) or what not in FAULTS:
        close = meant(what, FAULTS) if isinstance(what, str) else ""
        wrong(
            "what",
            f"no fault is called {what}{close}" if what else "`what` goes wrong is not said",
            " ".join(FAULTS),
        )
        return None
    taken = {"what", "who", "step", "after", "phase", "late", *FAULTS[what].options}
    known = {field.name for field in fields(Fault)}
    for key, value in said.items():
        if key not in taken:
            verb = f"{what} takes no {key}" if key in known else f"unknown key {key}{meant(key, taken)}"
            wrong(key, verb, " ".join(sorted(taken)))
        elif key in _WHOLE or key in _NUMBERS:
            _number(key, value, wrong)
        elif key in _TEXTS and (not isinstance(value, str) or (_TEXTS[key] and value not in _TEXTS[key])):
            wrong(key, f"{key} = {value!r}: {' or '.join(_TEXTS[key]) or 'a name'} is wanted")
    if said.get("module") and said.get("part", "backward") not in ("forward", "backward"):
        wrong("module", f"a module has no {said['part']}", "part=forward or part=backward")
    if what != "clock" and isinstance(seconds := said.get("seconds"), int | float) and seconds < 0:
        wrong("seconds", f"seconds = {seconds}: only a clock jumps back")
    _who(said.get("who", ANY), what, ranks, wrong)
    _when(said, steps, wrong)
    if len(problems) > before:
        return None
    values = {key: float(v) if key in _NUMBERS else v for key, v in said.items()}
    if values.get("who") == _LAUNCHER:
        values["who"] = SUPERVISOR
    return Fault(**{**_defaults(what), **values})


def _number(key: str, value: Any, wrong: Any) -> None:
    least, most = _WHOLE.get(key) or _NUMBERS[key]
    is_number = isinstance(value, int if key in _WHOLE else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if key in _WHOLE else "a number"
        wrong(key, f"{key} = {value!r}: {kind} from {least:g} to {most:g} is wanted")


def _who(who: Any, what: str, ranks: int, wrong: Any) -> None:
    if isinstance(who, bool) or not isinstance(who, int | str):
        wrong("who", f"who = {who!r}: a rank, any, supervisor or helper is wanted")
    elif isinstance(who, int) and not 0 <= who < ranks:
        wrong("who", f"there is no rank {who}", f"0 to {ranks - 1}: the run has {ranks} ranks")
    elif isinstance(who, str) and who not in (ANY, *ABOVE, _LAUNCHER):
        wrong("who", f"who = {who}: a rank, any, supervisor or helper is wanted{meant(who, (ANY, *ABOVE))}")
    elif isinstance(who, str) and who != ANY and not FAULTS[what].processes:
        wrong("who", f"{what} befalls ranks; the {who} can be killed or sent SIGTERM", "kill or term")


def _when(said: Mapping[str, Any], steps: int, wrong: Any) -> None:
    phase, step, after = said.get("phase"), said.get("step"), said.get("after")
    if phase is not None and phase not in PHASES:
        wrong("phase", f"there is no phase {phase}{meant(str(phase), PHASES)}", " ".join(PHASES))
    elif after is not None and (step is not None or phase is not None):
        wrong("after", "`after` seconds is a moment by itself, beside step and phase", "one of them")
    elif after is None and step is None and (phase is None or phase in IN_STEP):
        wrong("what", "no moment: `step`, `after` seconds, or `phase` start, save or recovery", "step = 10")
    elif step is not None and phase in ("start", "recovery"):
        wrong("phase", f"{phase} belongs to no step", "without step")
    elif isinstance(step, int) and step > steps:
        wrong("step", f"step {step} never comes: the run has {steps}", "--train.steps")

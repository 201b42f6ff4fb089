"""What a fuzz of stacks draws: a training step, its ranks and a stack's options, from a seed and a number alone."""

import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.spec.errors import UsageError
from unisono.spec.words import meant
from unisono_contrib.library.stacks._adapter import StackAdapter

Words = Mapping[str, Any]

DIMENSIONS: Mapping[str, Sequence[Any]] = {
    "ranks": (1, 2, 3, 4),
    "micros": (1, 2, 3, 4),
    "steps": (1, 2, 3),
    "model": ("mlp", "norms", "frozen", "twice", "gpt", "moe", "idle", "unused"),
    "optimizer": ("sgd", "momentum", "nesterov", "adam", "adamw", "groups", "amsgrad", "rmsprop", "adagrad"),
    "targets": ("even", "uneven", "empty"),
    "clip": (0.0, 0.5, 0.05),
}
"""What a case says of a training step, and the values that are drawn, the simplest first."""
USUAL: Words = {key: values[0] for key, values in DIMENSIONS.items()} | {
    "ranks": 2,
    "steps": 2,
    "seed": 0,
    "train": "",
}
"""What a word means that is left out: as `check_stack` has it."""
UNUSED = ("idle", "unused")
"""Models with parameters that some batches do not use."""
OFTENER = {"gpt": 3, "moe": 2}  # models, than the others
MOST_RANKS = 4
OFTEN = 0.3  # how often an option with one other value has it


@dataclass(frozen=True, slots=True)
class StackCase:
    """A drawn training step on a stack. words: all of `USUAL`, by the same names. options: the stack's that are not its
    usual ones. `train` is the user's own, FILE.py:FUNCTION, a function of the step and the place."""

    stack: str
    words: Words
    options: Words = field(default_factory=dict)

    @property
    def plan(self) -> str:
        """As `--stack` takes it: `ddp ranks=3 model=gpt static_graph=true`."""
        unusual = {key: value for key, value in self.words.items() if value != USUAL[key]}
        return " ".join(
            [self.stack, *(f"{key}={_text(x)}" for key, x in (unusual | dict(self.options)).items())]
        )

    def command(self) -> str:
        """What proves it again."""
        return f"unisono verify --stack {shlex.quote(self.plan)}"

    def values(self) -> Iterator[tuple[str, str]]:
        """(dimension, value) of each that it has."""
        yield "stack", self.stack
        yield from ((key, str(self.words[key])) for key in DIMENSIONS)
        yield from ((f"{self.stack}.{key}", _text(value)) for key, value in self.options.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def parse(text: str) -> tuple[list[str], dict[str, Any]]:
    """The stacks and the words of `ddp,fsdp2 model=gpt micros=3`. Raises UsageError V12."""
    names, *pairs = text.split() or [""]
    words: dict[str, Any] = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not is_pair or not key:
            raise no_case(f"{pair!r} is no word of a case", "KEY=VALUE")
        words[key] = _read(key, value)
    return names.split(","), words


def _read(key: str, text: str) -> Any:
    """Raises UsageError V12 for a value that this key does not have."""
    if key == "train":
        return text
    value: Any
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    usual = USUAL.get(key)
    if isinstance(usual, str) and value not in DIMENSIONS[key]:
        what = f"there is no {key} {text!r}{meant(text, DIMENSIONS[key])}"
        raise no_case(what, f"one of: {' '.join(DIMENSIONS[key])}")
    if isinstance(usual, (int, float)):
        least = 0 if key in ("seed", "clip") else 1
        kinds = (int, float) if key == "clip" else (int,)
        if type(value) not in kinds or value < least or (key == "ranks" and value > MOST_RANKS):
            raise no_case(f"{key}={text} is no number that fits", f"{key}={DIMENSIONS.get(key, (0,))[-1]}")
        return type(usual)(value)
    return value


def no_case(what: str, fix: str) -> UsageError:
    """The error of words that make no case."""
    return UsageError(what, where="unisono verify --stack", fix=fix, code="V12")


def case_of(stack: str, words: Words) -> StackCase:
    """The case of these words; those that say nothing of the training step are options of the stack."""
    known = {key: words.get(key, usual) for key, usual in USUAL.items()}
    return StackCase(stack, known, {key: value for key, value in words.items() if key not in USUAL})


def draw(stack: str, kind: type[StackAdapter], seed: int, number: int, words: Words) -> StackCase:
    """The case with this number, on a stack that has `draws`. words: those that are not drawn."""
    rng = random.Random(f"stack {stack} {seed} {number}")
    drawn: dict[str, Any] = {key: rng.choice(values) for key, values in DIMENSIONS.items()}
    drawn |= {"ranks": rng.choices((1, 2, 3, 4), weights=(1, 5, 2, 3))[0], "seed": rng.randrange(100)}
    models = kind.models or DIMENSIONS["model"]
    drawn["model"] = rng.choices(models, weights=[OFTENER.get(name, 1) for name in models])[0]
    for key, (_, *others) in (kind.draws or {}).items():
        if others and (len(others) > 1 or rng.random() < OFTEN):
            drawn[key] = rng.choice(others)
    drawn |= words
    if drawn["targets"] == "empty" and drawn["ranks"] * drawn["micros"] == 1:
        drawn["targets"] = "uneven"  # a step without any target has no mean
    if drawn["model"] in UNUSED:
        drawn |= kind.for_unused
    return case_of(stack, drawn)


def smaller(case: StackCase) -> Iterator[StackCase]:
    """Cases with one option less, or with one simpler word."""
    for key in case.options:
        yield StackCase(case.stack, case.words, {k: v for k, v in case.options.items() if k != key})
    for key, values in {"seed": (0,), **DIMENSIONS}.items():
        value = case.words[key]
        for simpler in values[: values.index(value)] if value in values else values[:1]:
            if simpler != value:
                yield StackCase(case.stack, {**case.words, key: simpler}, case.options)

"""Options behind those words of a plan that no family of members stands behind: `zero=3:wire=int8,prefetch=2`,
`tp=4:chunks=2`, `precision=bf16:params`. An option belongs to the value behind which it is written: another value has
none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from unisono.spec.errors import Problem

BLOCK = 64
"""Elements of a row that share one scale in an int8 wire."""


@dataclass(frozen=True, slots=True)
class Wires:
    """The options of `zero`: what crosses `shard` in another form, and when.

    gather, scatter: "" as it is, or "int8", in blocks of a row with a scale each (Wang et al., ZeRO++, 2023).
    prefetch: blocks whose parameters are gathered ahead of the one that computes; 0: none.
    """

    gather: str = ""
    scatter: str = ""
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The options of `precision`: the dtype in which parameters are kept, and how losses are scaled.

    params: forward and backward have parameters in bf16, the optimiser has masters in fp32. stochastic: parameters are
    bf16 and have no masters; an update is rounded up or down at random (Gupta et al., 2015). fp8: linear layers of
    blocks multiply numbers of eight bits. scale: of the loss under
    fp16 at the beginning, a power of two. window: steps without an overflow after which it is doubled.
    """

    params: bool = False
    stochastic: bool = False
    fp8: bool = False
    scale: int = 1 << 16
    window: int = 2000

    @property
    def narrow(self) -> bool:
        """Whether modules hold parameters in bf16."""
        return self.params or self.stochastic


TAKEN: Mapping[str, str] = {
    "tp": "chunks=N",
    "zero": "wire=int8, gather=int8, scatter=int8, prefetch=K",
    "bf16": "params or stochastic, fp8",
    "fp16": "scale=2^K, window=STEPS",
}
"""What may stand behind a value, by its key or its word, as help says it."""
SAMPLES: Mapping[str, tuple[str, ...]] = {
    "zero": ("3:wire=int8,prefetch=2",),
    "precision": ("bf16:params", "bf16:stochastic", "bf16:fp8"),
}
"""Values with options, for those who try every kind of value."""


@cache
def wires_of(text: str) -> Wires:
    """Read the options of a value of `zero` without problems."""
    got = dict(_pairs(text))
    both = got.get("wire", "")
    return Wires(got.get("gather", both), got.get("scatter", both), int(got.get("prefetch", 0)))


@cache
def arithmetic_of(text: str) -> Arithmetic:
    """Read the options of a value of `precision` without problems."""
    got = dict(_pairs(text))
    numbers = {key: int(got[key]) for key in ("scale", "window") if key in got}
    return Arithmetic(params="params" in got, stochastic="stochastic" in got, fp8="fp8" in got, **numbers)


@cache
def chunks_of(text: str) -> int:
    """Read the option of a value of `tp` without problems: the chunks in which its products gather and scatter
    positions."""
    return int(dict(_pairs(text)).get("chunks", 1))


def options_problem(key: str, text: str, where: str) -> Problem | None:
    """What is wrong with the options of a value, if anything: the first of it."""
    word, colon, _ = text.partition(":")
    if not colon:
        return None
    name = key if key in ("zero", "tp") else word
    taken = TAKEN.get(name)
    if taken is None:
        return Problem("P05", f"{key}={text}: {word} takes no such options", where, f"write {key}={word}")
    pairs = _pairs(text)
    options = {option for option, _ in pairs}
    good = bool(pairs) and len(options) == len(pairs) and not options >= {"params", "stochastic"}
    if not good or not all(_fits(name, *pair) for pair in pairs):
        what = f"{key}={text}: {name} takes other options"
        return Problem("P05", what, where, f"{taken}, for example {key}={word}:{_example(name)}")
    return None


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = text.partition(":")[2].replace(":", ",").split(",")
    return [(part.partition("=")[0], part.partition("=")[2]) for part in parts if text.partition(":")[1]]


def _fits(name: str, option: str, value: str) -> bool:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else 0
    if name == "zero":
        return (
            value == "int8"
            if option in ("wire", "gather", "scatter")
            else option == "prefetch" and number > 0
        )
    if name == "tp":
        return option == "chunks" and number > 1
    if name == "bf16":
        return option in ("params", "stochastic", "fp8") and not value
    if option == "scale":
        return 0 < number <= 1 << 24 and number & (number - 1) == 0
    return option == "window" and number > 0


def _example(name: str) -> str:
    return {"tp": "chunks=2", "zero": "wire=int8", "bf16": "params", "fp16": "scale=65536"}[name]

"""Stragglers: how long ranks wait for the slowest of them, where all meet in every step.

A rank's step takes a random time around a mean of 1; ranks are independent, and none is slow for good.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, log, log1p, sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist

from unisono.plan.grammar import meant
from unisono.spec.errors import UsageError
from unisono.spec.work import Durations

KINDS = ("normal", "lognormal", "exponential", "measured")
_ODDS = [0.05 * n for n in range(-680, 681)]  # logarithms of odds
_NEARLY_1 = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution of times. tail(q): the time that a share q of all steps exceeds, 0 < q < 1."""

    name: str
    tail: Callable[[float], float]

    def durations(self, replicas: int, ranks: int, steps: int) -> Durations:
        draw = Random(replicas)

        def slowest() -> float:
            """Of `ranks` ranks: a time that a share q of the ranks exceeds is exceeded with probability 1 - (1-q)^n."""
            return self.tail(-expm1(log(1.0 - draw.random()) / ranks))

        return [[slowest() for _ in range(steps)] for _ in range(replicas)]

    def slowest(self, n: int) -> float:
        """Mean of the maximum over n ranks.

        With a share of maxima 1/(1+e^t) beyond each time: the trapezoid rule over t, which converges exponentially.
        """
        shares = [1.0 / (1.0 + exp(t)) for t in _ODDS]
        weights = [share * (1.0 - share) for share in shares]
        # 1 - (1-q)^(1/n), exact also for the smallest q: what one rank exceeds where the maximum does with q
        times = (self.tail(-expm1(log1p(-min(q, _NEARLY_1)) / n)) for q in shares)
        return sum(weight * time for weight, time in zip(weights, times, strict=True)) / sum(weights)


def law(text: str) -> Law:
    """Reads `normal:0.05`, `lognormal:0.1`, `exponential:0.05` (standard deviation beside the mean), `measured:FILE`.

    exponential: a fixed part and an exponential tail. FILE: numbers, one a line or more, in any unit: their mean is 1
    here. Raises UsageError.
    """
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        raise _unread(f"{text!r}: no such distribution{meant(kind, KINDS)}", "normal:0.05, or lognormal exponential"
                      " measured:FILE")  # fmt: skip
    if not colon or not rest:
        missing = "which file" if kind == "measured" else "how uneven ranks are"
        raise _unread(f"{text!r} does not say {missing}", "measured:FILE or measured:RUN" if kind == "measured"
                      else f"{kind}:0.05, of a mean of 1")  # fmt: skip
    if kind == "measured":
        return measured(_numbers(Path(rest)))
    try:
        spread = float(rest)
    except ValueError:
        spread = -1.0
    if not 0.0 < spread <= (1.0 if kind == "exponential" else 3.0):
        raise _unread(f"{text!r}: {rest!r} is not a standard deviation beside a mean of 1", f"{kind}:0.05")
    if kind == "normal":
        return Law(text, lambda q: 1.0 + spread * _normal(q))
    if kind == "exponential":
        return Law(text, lambda q: 1.0 - spread - spread * log(q))
    sigma = sqrt(log1p(spread * spread))
    return Law(text, lambda q: exp(sigma * _normal(q) - sigma * sigma / 2.0))


def _unread(what: str, fix: str, code: str = "C04") -> UsageError:
    return UsageError(f"stragglers {what}", where="--stragglers", fix=fix, code=code)


def _normal(q: float) -> float:
    """What a standard normal exceeds with probability `q`, which rounding may have brought to 1."""
    return -NormalDist().inv_cdf(min(max(q, 1e-300), _NEARLY_1))


def measured(times: Sequence[float]) -> Law:
    """Of measured steps, divided by their mean; straight between neighbours."""
    ordered = sorted(times, reverse=True)
    mean = sum(ordered) / len(ordered)

    def tail(q: float) -> float:
        at = q * len(ordered) - 0.5
        low = min(max(int(at), 0), len(ordered) - 1)
        high = min(low + 1, len(ordered) - 1)
        part = min(max(at - low, 0.0), 1.0)
        return (ordered[low] * (1.0 - part) + ordered[high] * part) / mean

    return Law(f"measured, {len(ordered)} steps", tail)


def _numbers(path: Path) -> list[float]:
    try:
        numbers = [float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unread(f"measured:{path}: {reason}", "a file of numbers, one step a line", "C03") from None
    if not numbers or min(numbers) <= 0.0 or max(numbers) == inf:
        raise _unread(f"measured:{path} has no step times above 0", "one step a line", "C03")
    return numbers

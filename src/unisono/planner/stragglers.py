"""Stragglers: how long ranks wait for each other, for every way of staying together.

A rank's step takes a random time around a mean of 1; ranks are independent. Where nobody waits, or all for the slowest,
the mean is computed. Every other policy says when a rank may begin its next step, given when all ended theirs:
thousands of steps are played with a fixed seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1, inf, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated

from unisono.plan.grammar import choice, meant
from unisono.planner.machines.cluster import Source
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("normal", "lognormal", "exponential", "measured")
_PLAYED = Source(
    "specification", "ours: a tenth of a second of play, in which a wait is right within a per cent or so"
)
_STEPS: Annotated[int, _PLAYED] = 4000
_DRAWS: Annotated[int, _PLAYED] = 1 << 20  # steps times replicas
_MOST: Annotated[int, _PLAYED] = 1 << 12  # replicas that are played; more wait a little longer than told
_ODDS = [0.05 * n for n in range(-680, 681)]  # logarithms of odds
_NEARLY_1 = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution of times. tail(q): the time that a share q of all steps exceeds, 0 < q < 1."""

    name: str
    tail: Callable[[float], float]

    def slowest_of(self, n: int) -> "Law":
        """Of the maximum over n."""
        if n == 1:
            return self
        # 1 - (1-q)^(1/n), exact also for the smallest q
        return Law(self.name, lambda q: self.tail(-expm1(log1p(-min(q, _NEARLY_1)) / n)))


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


def _unread(what: str, fix: str) -> UsageError:
    return UsageError(f"stragglers {what}", where="--stragglers", fix=fix, code="C04")


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
        found = [float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"cannot read step times from {path}: {reason}"
        raise UsageError(
            what, where="--stragglers", fix="a file of numbers, one step a line", code="C03"
        ) from None
    if not found or min(found) <= 0.0 or max(found) == inf:
        what = f"{path} has no step times above 0"
        raise UsageError(what, where="--stragglers", fix="one step a line", code="C03")
    return found


def mean(of: Law) -> float:
    """With a share of steps 1/(1+e^t) beyond each time: the trapezoid rule over t, which converges exponentially."""
    shares = [1.0 / (1.0 + exp(t)) for t in _ODDS]
    weights = [share * (1.0 - share) for share in shares]
    return sum(weight * of.tail(share) for weight, share in zip(weights, shares, strict=True)) / sum(weights)


@dataclass(frozen=True, slots=True)
class PolicyPace:
    """One policy with stragglers. step: seconds of a step beside a rank's own mean of 1. counted: share of the samples
    that reach the update. said: who waits for whom."""

    step: float
    counted: float
    said: str


Meet = Callable[
    ["np.ndarray", int], "np.ndarray"
]  # (when each ended a step, its number) -> when each begins the next


@lru_cache(maxsize=256)
def pace(of: Law, sync: str, replicas: int, inner: int) -> PolicyPace:
    """`replicas` of `inner` ranks each, which stay together in every step, under a policy of the plan.

    Raises UsageError for a quorum of more replicas than there are.
    """
    import numpy as np

    got, replica = choice(sync), of.slowest_of(inner)
    alone: Meet = lambda ended, _: ended
    slowest: Meet = lambda ended, _: np.full_like(ended, ended.max())
    if got.name in ("async", "hogwild"):
        return PolicyPace(mean(replica), 1.0, "no replica waits for another")
    if got.name in ("local_sgd", "diloco"):
        h = int(got.options["h"])
        meet: Meet = lambda ended, step: alone(ended, step) if (step + 1) % h else slowest(ended, step)
        return PolicyPace(_played(replica, replicas, meet, h), 1.0, f"all wait every {h} steps")
    if got.name == "quorum":
        k = int(got.options["k"])
        if k > replicas:
            what = f"sync={sync}: a quorum of {k} among {replicas} replicas"
            raise UsageError(
                what, where="plan.sync, plan.dp", fix=f"quorum:k={max(1, replicas - 1)}", code="P16"
            )
        place = max(0, round(k / replicas * min(replicas, _MOST)) - 1)
        meet = lambda ended, _: np.full_like(ended, np.partition(ended, place)[place])
        said = f"the first {k} of {replicas} count (Chen et al., 2016)"
        return PolicyPace(_played(replica, replicas, meet), k / replicas, said)
    if got.name in ("ssp", "delayed"):
        s = int(got.options["s"]) if got.name == "ssp" else 1
        said = f"nobody is more than {s} step{'s' * (s > 1)} ahead (Ho et al., 2013)"
        return PolicyPace(_played(replica, replicas, _bounded(s)), 1.0, said)
    if got.name == "gossip":
        meet = lambda ended, _: np.maximum(np.maximum(np.roll(ended, 1), np.roll(ended, -1)), ended)
        return PolicyPace(
            _played(replica, replicas, meet), 1.0, "each waits for two neighbours (Lian et al., 2017)"
        )
    return PolicyPace(mean(replica.slowest_of(replicas)), 1.0, "all wait for the slowest in every step")


def compared(own: str, replicas: int) -> list[str]:
    """Policies whose waits are told beside each other, the plan's own first. Four spares of a hundred, as Chen et al.,
    2016, found best."""
    if replicas == 1:
        return [own]
    spare = f"quorum:k={max(1, min(replicas - 1, round(0.96 * replicas)))}"
    others = ["every_step", spare, "delayed", "ssp:s=3", "local_sgd:h=8", "gossip", "async"]
    return [own, *(other for other in others if other != own)]


def _bounded(staleness: int) -> Meet:
    """A step begins when its rank has ended the one before and all have ended the one `staleness` + 1 before."""
    import numpy as np

    slowest: list[float] = []  # of the last steps, the oldest first

    def meet(ended: "np.ndarray", _: int) -> "np.ndarray":
        slowest.append(float(ended.max()))
        return np.maximum(ended, slowest.pop(0)) if len(slowest) > staleness else ended

    return meet


def _played(of: Law, replicas: int, meet: Meet, period: int = 1) -> float:
    """Mean seconds of a step, after a tenth of the steps that are played. period: steps after which it repeats."""
    import numpy as np

    count = min(replicas, _MOST)
    begin = period * max(1, min(_STEPS, _DRAWS // count) // (10 * period))
    times = np.maximum.accumulate([of.tail(1.0 / (1.0 + exp(t))) for t in _ODDS])
    draws, ended, first = np.random.default_rng(0), np.zeros(count), 0.0
    for step in range(10 * begin):
        ended = meet(ended + np.interp(draws.logistic(size=count), _ODDS, times), step)
        if step == begin - 1:
            first = float(ended.mean())
    return (float(ended.mean()) - first) / (9 * begin)

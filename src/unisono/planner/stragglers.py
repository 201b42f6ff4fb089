"""Stragglers: how long ranks wait for each other, for every way of staying together; and where a server saturates.

A rank's step takes a random time around a mean of 1; ranks are independent. The expected maximum over n ranks, and
the k-th of n, are computed by quadrature over the order statistic, not sampled. What has no closed form (bounded
staleness, gossip) is played by its own recursion with a fixed seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, lgamma, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from unisono.plan.grammar import choice, meant
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("normal", "lognormal", "exponential", "measured")
_POINTS = 801  # of a quadrature: the trapezoid rule converges exponentially on these bells
_NEARLY_1 = 1.0 - 2.0**-53
_GRID = 1 << 14  # points of a distribution's sum
_BURN = 100  # steps of a played policy that are not counted
_DRAWS = 1 << 20  # steps times replicas that are played: a tenth of a second
_MOST = 1 << 12  # replicas that are played; more wait a little longer than told


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
    if kind in KINDS and not rest:
        what = f"stragglers {text!r} does not say {'which file' if kind == 'measured' else 'how uneven ranks are'}"
        fix = "measured:FILE or measured:RUN" if kind == "measured" else f"{kind}:0.05, of a mean of 1"
        raise UsageError(what, where="--stragglers", fix=fix, code="C04")
    if kind not in KINDS or not colon:
        what = f"stragglers {text!r}: no such distribution{meant(kind, KINDS)}"
        raise UsageError(
            what, where="--stragglers", fix="normal:0.05, or lognormal exponential measured:FILE", code="C04"
        )
    if kind == "measured":
        return measured(_numbers(Path(rest)))
    try:
        spread = float(rest)
    except ValueError:
        spread = -1.0
    if not 0.0 < spread <= (1.0 if kind == "exponential" else 3.0):
        what = f"stragglers {text!r}: {rest!r} is not a standard deviation beside a mean of 1"
        raise UsageError(what, where="--stragglers", fix=f"{kind}:0.05", code="C04")
    if kind == "normal":
        return Law(text, lambda q: 1.0 + spread * _normal(q))
    if kind == "exponential":
        return Law(text, lambda q: 1.0 - spread - spread * log(q))
    sigma = sqrt(log1p(spread * spread))
    return Law(text, lambda q: exp(sigma * _normal(q) - sigma * sigma / 2.0))


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
        raise UsageError(
            f"{path} has no step times above 0", where="--stragglers", fix="one step a line", code="C03"
        )
    return found


def expected(of: Law, n: int = 1, k: int | None = None) -> float:
    """Mean of the k-th fastest of n, or of the slowest.

    With u = 1/(1+e^-t) the k-th order statistic has the density u^k (1-u)^(n-k+1) / B in t: a bell, summed by the
    trapezoid rule out to where 1e-18 of its height is left.
    """
    k = n if k is None else k
    if not 1 <= k <= n:
        raise ValueError(f"the {k}-th of {n}")
    scale = lgamma(n + 1) - lgamma(k) - lgamma(n - k + 1)

    def height(t: float) -> float:
        below, above = -log1p(exp(-t)) if t > -700 else t, -t - log1p(exp(-t)) if t > -700 else 0.0
        return scale + k * below + (n - k + 1) * above

    top = log(k / (n + 1 - k))
    peak = height(top)
    low, high = _edge(height, top, -1.0, peak - 41.5), _edge(height, top, 1.0, peak - 41.5)
    width = (high - low) / (_POINTS - 1)
    total = mass = 0.0
    for number in range(_POINTS):
        t = low + width * number
        weight = exp(height(t) - peak)
        mass += weight
        total += weight * of.tail(1.0 / (1.0 + exp(t)))
    return total / mass


def _edge(height: Callable[[float], float], top: float, way: float, least: float) -> float:
    reach = 1.0
    while height(top + way * reach) > least:
        reach *= 2.0
    low, high = 0.0, reach
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if height(top + way * middle) > least else (low, middle)
    return top + way * high


def mean_of(of: Law, steps: int) -> Law:
    """Of the mean over `steps` independent steps: the density's Fourier transform to that power."""
    if steps == 1:
        return of
    import numpy as np

    odds, times = _table(of)
    low, high = float(times[0]), float(times[-1])
    grid = np.linspace(low, high, _GRID)
    below = np.interp(grid, times, 1.0 / (1.0 + np.exp(-odds)))
    density = np.diff(below, prepend=0.0)
    density /= density.sum()
    # The sum reaches from 0 to steps * _GRID cells; it is folded into as many as its bulk needs.
    mean = float((density * np.arange(_GRID)).sum())
    spread = sqrt(float((density * np.arange(_GRID) ** 2).sum()) - mean * mean)
    size = 1 << max(14, int(2 * 12 * spread * sqrt(steps) + 2 * _GRID).bit_length())
    whole = np.fft.irfft(np.fft.rfft(density, size) ** steps, size).clip(0.0)
    # Folding wraps cells around; put the bulk in the middle.
    first = round(mean * steps) - size // 2
    whole = np.roll(whole, -(first % size))
    sums = np.cumsum(whole)
    sums /= sums[-1]
    cell = (grid[1] - grid[0]) / steps
    at = low + cell * (first + np.arange(size))
    upper = 1.0 - sums
    # From the far end, where 1 - sums has lost its digits.
    upper = np.minimum(upper, np.cumsum(whole[::-1])[::-1] / whole.sum())
    rising = np.flatnonzero(np.diff(upper) < 0)
    tails, values = upper[rising][::-1], at[rising][::-1]
    return Law(f"mean of {steps}", lambda q: float(np.interp(q, tails, values)))


def _table(of: Law) -> "tuple[np.ndarray, np.ndarray]":
    """(log-odds, time), rising."""
    import numpy as np

    odds = np.linspace(-34.0, 34.0, 1361)
    times = np.array([of.tail(1.0 / (1.0 + exp(t))) for t in odds])
    return odds, np.maximum.accumulate(times)


def _drawn(of: Law, n: int) -> "np.ndarray":
    import numpy as np

    odds, times = _table(of)
    n = min(n, _MOST)
    return np.interp(np.random.default_rng(0).logistic(size=(_BURN + min(4000, _DRAWS // n), n)), odds, times)


def bounded(of: Law, n: int, staleness: int) -> float:
    """Mean seconds of a step where nobody is more than `staleness` steps ahead of the slowest (Ho et al., 2013).

    Played: a step begins when its rank has ended the one before and all have ended the one `staleness` + 1 before.
    """
    import numpy as np

    drawn = _drawn(of, n)
    ended = np.zeros(drawn.shape[1])
    slowest = [0.0] * (staleness + 1)  # of the last steps, the oldest first
    after = 0.0
    for number, times in enumerate(drawn):
        ended = np.maximum(ended, slowest.pop(0)) + times
        slowest.append(float(ended.max()))
        if number == _BURN - 1:
            after = float(ended.mean())
    return (float(ended.mean()) - after) / (len(drawn) - _BURN)


def gossip(of: Law, n: int) -> float:
    """Mean seconds of a step where each of a ring waits for its two neighbours alone (Lian et al., 2017). Played."""
    import numpy as np

    drawn = _drawn(of, n)
    ended, after = np.zeros(drawn.shape[1]), 0.0
    for number, times in enumerate(drawn):
        ended = np.maximum(np.maximum(np.roll(ended, 1), np.roll(ended, -1)), ended) + times
        if number == _BURN - 1:
            after = float(ended.mean())
    return (float(ended.mean()) - after) / (len(drawn) - _BURN)


@dataclass(frozen=True, slots=True)
class PolicyPace:
    """One policy with stragglers. step: seconds of a step beside a rank's own mean of 1. counted: share of the samples
    that reach the update. said: how it was found."""

    step: float
    counted: float
    said: str


def pace(of: Law, sync: str, replicas: int, inner: int) -> PolicyPace:
    """`replicas` of `inner` ranks each, which stay together in every step, under a policy of the plan.

    Raises UsageError for a quorum of more replicas than there are.
    """
    got, replica = choice(sync), of.slowest_of(inner)
    if got.name in ("local_sgd", "diloco"):
        h = int(got.options["h"])
        return PolicyPace(expected(mean_of(replica, h), replicas), 1.0, f"all wait every {h} steps")
    if got.name == "quorum":
        k = int(got.options["k"])
        if k > replicas:
            what = f"sync={sync}: a quorum of {k} among {replicas} replicas"
            raise UsageError(
                what, where="plan.sync, plan.dp", fix=f"quorum:k={max(1, replicas - 1)}", code="P16"
            )
        said = f"the first {k} of {replicas} count (Chen et al., 2016)"
        return PolicyPace(expected(replica, replicas, k), k / replicas, said)
    if got.name == "ssp":
        s = int(got.options["s"])
        return PolicyPace(
            bounded(replica, replicas, s), 1.0, f"nobody is more than {s} steps ahead; played, seed 0"
        )
    if got.name == "delayed":
        said = "gradients are one step late, which is a staleness of 1; played, seed 0"
        return PolicyPace(bounded(replica, replicas, 1), 1.0, said)
    if got.name == "gossip":
        return PolicyPace(gossip(replica, replicas), 1.0, "each waits for two neighbours; played, seed 0")
    if got.name in ("async", "hogwild"):
        return PolicyPace(expected(replica), 1.0, "no replica waits for another")
    return PolicyPace(expected(replica, replicas), 1.0, "all wait for the slowest in every step")


@dataclass(frozen=True, slots=True)
class Server:
    """A parameter server beside `workers`. rate: their steps a second in all. ideal: the same if it took no time.
    busy: share of the time in which the server is."""

    workers: int
    rate: float
    ideal: float
    busy: float


def server(compute: float, serve: float, workers: Sequence[int]) -> tuple[Server, ...]:
    """The throughput curve: a worker computes for `compute` seconds, then has the server for `serve`.

    A closed queue with one server, solved exactly by mean value analysis (Reiser and Lavenberg, 1980) for exponential
    times; constant times wait less. The server is full at (compute + serve) / serve workers.
    """
    found, waiting = [], 0.0
    for count in range(1, max(workers) + 1):
        here = serve * (1.0 + waiting)
        rate = count / (compute + here)
        waiting = rate * here
        if count in workers:
            found.append(Server(count, rate, count / (compute + serve), min(1.0, rate * serve)))
    return tuple(found)


def breaks_at(compute: float, serve: float) -> float:
    """Workers beyond which a server of `serve` seconds a step is the limit (Denning and Buzen, 1978)."""
    return (compute + serve) / serve if serve > 0.0 else inf

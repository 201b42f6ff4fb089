"""The likely cause of a wrong gradient that is a mixture of right shares, by how often each of them counts."""

import math
from collections.abc import Sequence
from itertools import pairwise

from unisono.spec.words import listed
from unisono.verify.evidence import Cause, Evidence

NEAR = 1e-3  # of a share's weight: whole numbers are told apart, rounding is not seen


def by_weights(ev: Evidence, weights: Sequence[float], where: str, alike: bool) -> Cause | None:
    """weights: how often each share counts. where: in which gradients. alike: whether all ranks hold the same."""
    lost = [i for i, w in enumerate(weights) if abs(w) < NEAR]
    odd = {i: w for i, w in enumerate(weights) if i not in lost and abs(w - 1) > NEAR}
    if len(lost) == len(weights) or not (lost or odd):
        return None
    text = _counts(ev, odd)
    if lost:
        if alike and odd and _sums_to_all(weights):
            missing = f"{ev.share} {listed(lost)} of the batch is missing"
            reason = f"and as many count too often ({text}): ranks read the samples of others"
            return Cause("leaf_twice", f"{where} {missing}, {reason}")
        name, missing = _lost(ev, lost, len(weights))
        return Cause(name, f"{where} {', '.join(filter(None, (missing, text)))}")
    return (
        _rescaled(ev, weights, where)
        or _means(ev, weights, where, text)
        or Cause("counted_twice" if max(odd.values()) > 1 else "factor", f"{where} {text}")
    )


def _counts(ev: Evidence, odd: dict[int, float]) -> str:
    groups: dict[str, list[int]] = {}
    for i, w in odd.items():
        groups.setdefault(f"{w:.4g}", []).append(i)
    return listed([f"{ev.share} {listed(which)} counts {times} times" for times, which in groups.items()], 3)


def _sums_to_all(weights: Sequence[float]) -> bool:
    """Whether as many shares count in all as there are, each a whole number of times."""
    whole = all(abs(w - round(w)) < NEAR for w in weights)
    return whole and round(sum(weights)) == len(weights)


def _rescaled(ev: Evidence, weights: Sequence[float], where: str) -> Cause | None:
    """Each micro-batch multiplies all those before it by one number: weights are a geometric series, three of them at
    least, of all shares or of those of each rank."""
    each = ev.sizes.get("the shares of one rank", 0)
    for length in dict.fromkeys((len(weights), each)):
        if length < 3 or len(weights) % length:
            continue
        rows = [weights[i : i + length] for i in range(0, len(weights), length)]
        factors = [a / b for row in rows for a, b in pairwise(row)]
        c = factors[0]
        if abs(c - 1) > NEAR and all(math.isclose(f, c, rel_tol=NEAR) for f in factors):
            steps = " to ".join(f"{w:.4g}" for w in (rows[0][0], rows[0][-1]))
            text = (
                f"each {ev.share} multiplies what was there before it by {c:.4g} (they count {steps} times)"
            )
            return Cause("rescaled_each_micro_batch", f"{where} {text}: what has been summed is scaled again")
    return None


def _means(ev: Evidence, weights: Sequence[float], where: str, counts: str) -> Cause | None:
    """A mean of means: a share of n of N targets counts N / (shares · n) times, so the inverse weights add up to the
    number of shares, whatever the n are."""
    if min(weights) <= 0 or not math.isclose(sum(1 / w for w in weights), len(weights), rel_tol=1e-6):
        return None
    each = ev.sizes.get("the shares of one rank", 0) or len(weights)
    rows = [weights[i : i + each] for i in range(0, len(weights), each)]
    whose = "rank" if all(max(row) - min(row) < NEAR for row in rows) else ev.share
    text = (
        f"each {whose} takes the mean over its own targets, and the mean of these is not that of all targets"
    )
    return Cause("mean_of_means", f"{where} {counts}: {text}")


def _lost(ev: Evidence, lost: Sequence[int], shares: int) -> tuple[str, str]:
    """(cause, what is missing), by where the missing shares are computed."""
    place, kept = ev.places, [i for i in range(shares) if i not in lost]
    if len(place) == shares:
        several = any(place[i][2] > 1 for i in kept)
        ranks = {place[i][0] for i in lost}
        if several and all(place[i][1] == place[i][2] - 1 for i in kept):
            return "missing_micro_batch", f"all but the last {ev.share} of each rank are lost"
        if not ranks & {place[i][0] for i in kept}:
            return "missing_share", f"all that {listed(sorted(ranks))} should add is missing"
    return "missing_micro_batch", f"{ev.share} {listed(lost)} of the batch is missing"

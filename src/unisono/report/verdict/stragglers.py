"""Who is late: the rank that the others wait for, in which part of its step, since when, and what that costs."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.report.verdict.evidence import BUSY, RankSeen, RunEvidence, StepSeen

ITS_SHARE = 0.7
"""Of all that ranks wait for late ones, what one of them must cause to be blamed."""
_QUIET = 0.02
"""Of a step: who is late by less is late by chance."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Seconds of a mean step that ranks wait for the late one among their peers. rank: who it is; None where it is now
    one and now another, `shares` says how often each. since, until: steps. phase: part of the step in which it takes
    longer than its peers. module: where, if modules were timed."""

    cost: float
    rank: RankSeen | None
    shares: tuple[tuple[str, float], ...]
    since: int
    until: int
    phase: str = ""
    module: str = ""
    longer: float = 0.0


def lateness(evidence: RunEvidence) -> Lateness | None:
    """The late ranks among those of one stage: stages differ by their work. None where no peers meet."""
    worst: Lateness | None = None
    stages: dict[int, list[RankSeen]] = defaultdict(list)
    for rank in evidence.ranks:
        stages[rank.coords.get("pp", 0)].append(rank)
    for peers in stages.values():
        if len(peers) > 1 and peers[0].steps:
            seen = _among(peers)
            worst = seen if worst is None or seen.cost > worst.cost else worst
    return worst


def _among(peers: Sequence[RankSeen]) -> Lateness:
    late = [_late(row) for row in zip(*(rank.steps for rank in peers), strict=True)]
    steps, whole = [step.step for step in peers[0].steps], sum(cost for _, cost in late)
    sums = [sum(cost for at, cost in late if at == place) for place in range(len(peers))]
    shares = tuple(
        (rank.name, total / whole if whole else 0.0) for rank, total in zip(peers, sums, strict=True)
    )
    place = max(range(len(peers)), key=sums.__getitem__)
    begin, end = _stretch([cost if at == place else -cost for at, cost in late])
    within = late[begin:end]
    its, every = sum(cost for at, cost in within if at == place), sum(cost for _, cost in within)
    often = sum(at == place for at, cost in within if cost > 0) / max(1, sum(cost > 0 for _, cost in within))
    if not whole or its < ITS_SHARE * whole or its < ITS_SHARE * every or often < ITS_SHARE:
        return Lateness(whole / len(late), None, shares, steps[0], steps[-1])
    phase, longer = _phase(peers, place, begin, end)
    module = _module(peers, place, begin, end) if phase in ("forward", "backward") else ""
    return Lateness(
        whole / len(late), peers[place], shares, steps[begin], steps[end - 1], phase, module, longer
    )


def _late(row: Sequence[StepSeen]) -> tuple[int, float]:
    """(which rank waited least in a step, seconds that the others wait more in the median)."""
    place = min(range(len(row)), key=lambda at: row[at].idle)
    others = [step.idle for at, step in enumerate(row) if at != place]
    cost = statistics.median(others) - row[place].idle - _excused(row, place)
    return place, cost if cost > _QUIET * max(step.wall for step in row) else 0.0


def _excused(row: Sequence[StepSeen], place: int) -> float:
    """Seconds that a rank is late for a reason which is a cause of its own: no core, garbage collection."""

    def excuse(step: StepSeen) -> float:
        return step.beside.get("queue_s", 0.0) + step.beside.get("gc_s", 0.0)

    others = statistics.median(excuse(step) for at, step in enumerate(row) if at != place)
    return max(0.0, excuse(row[place]) - others)


def _stretch(signed: Sequence[float]) -> tuple[int, int]:
    """The stretch in which a rank is late for most of the time: of the greatest sum of what is above a third of its
    usual lateness (Kadane's algorithm)."""
    usual = statistics.median([cost for cost in signed if cost > 0] or [0.0]) / 3
    best, begin, end, at, total = 0.0, 0, len(signed), 0, 0.0
    for index, cost in enumerate(signed):
        total += cost - usual
        if total <= 0:
            total, at = 0.0, index + 1
        elif total > best:
            best, begin, end = total, at, index + 1
    return begin, end


def _phase(peers: Sequence[RankSeen], place: int, begin: int, end: int) -> tuple[str, float]:
    """(the part in which a rank takes longest beside its peers' median, seconds more)."""

    def mean(rank: RankSeen, part: str) -> float:
        return statistics.fmean(step.parts.get(part, 0.0) for step in rank.steps[begin:end])

    def more(part: str) -> float:
        others = (mean(rank, part) for at, rank in enumerate(peers) if at != place)
        return mean(peers[place], part) - statistics.median(others)

    part = max(BUSY, key=more)
    return part, more(part)


def _module(peers: Sequence[RankSeen], place: int, begin: int, end: int) -> str:
    """The module whose own time is longest beside its peers', "" where nobody timed any."""
    sums: list[dict[str, list[float]]] = []
    for rank in peers:
        own: dict[str, list[float]] = defaultdict(list)
        for step in rank.steps[begin:end]:
            for name, seconds in step.modules.items():
                own[name].append(seconds)
        sums.append(own)

    def more(name: str) -> float:
        others = [statistics.fmean(own[name]) for at, own in enumerate(sums) if at != place and name in own]
        return statistics.fmean(sums[place][name]) - (statistics.median(others) if others else 0.0)

    return max(sums[place], key=more, default="")

"""Who holds the others up: which rank, in which part of a step, in which module, since when, and what it costs all.

Of a step, the culprit is the rank that waited least, and what it costs is what the others waited more (their median).
Below a tenth of the step nothing is said. A rank is blamed for steps in which it is the culprit so often, one after the
other, that chance does not explain it; where the culprit changes, nobody is.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.report.calls import RankStep, StepCalls

SILENT = 0.1
"""Of a step: what costs less is no straggler."""
PHASES = ("data", "forward", "backward", "optim", "other")
NOBODY = -1
_CHANCE = 0.01  # that a healthy run has a straggler by this account
_PENALTY = 2.0  # for a step in which somebody else is late, or nobody
_MOSTLY = 0.5  # of what is lost: less of it is no cause
_OFTEN = 2 / 3  # of all steps: what chance does to a busy host is less
_TURNS = 4  # stretches of several ranks, from which on they take turns


@dataclass(frozen=True, slots=True)
class Straggler:
    """One cause of waiting. rank: NOBODY where ranks take turns (rotating). phase: data, forward, backward, optim or
    other, module: that takes longer in it; "" where that is not known. since_step, until_step: the first and last of
    its steps, `steps` of which it held up. cost_s_per_step: seconds that the others waited for it, of each step.
    share: the same of a step."""

    rank: int
    phase: str
    module: str
    since_step: int
    cost_s_per_step: float
    share: float
    rotating: bool = False
    until_step: int = 0
    steps: int = 0

    def says(self) -> str:
        """`rank 2 is late in backward, in blocks.3.mlp, since step 812: the others wait 201 ms of each step (44 %)`."""
        who = "ranks take turns to be late" if self.rotating else f"rank {self.rank} is late"
        where = (f" in {self.phase}" if self.phase else "") + (f", in {self.module}" if self.module else "")
        cost = f"the others wait {self.cost_s_per_step * 1e3:.0f} ms of each step ({self.share:.0%})"
        return f"{who}{where}, since step {self.since_step}: {cost}"


@dataclass(frozen=True, slots=True)
class _Late:
    """What one step says: who held the others up, and what it cost in seconds; NOBODY where that is little."""

    at: StepCalls
    rank: int
    cost: float


def stragglers(steps: Sequence[StepCalls]) -> list[Straggler]:
    """Of these steps, in their order, the causes that cost most first. The first step of a run, which pays for
    starting, is better left out."""
    late = [_late(step) for step in steps if len(step.ranks) > 1]
    world = max((len(each.at.ranks) for each in late), default=0)
    if not late:
        return []
    enough = _beyond_chance(world, len(late))
    stretches = sorted(_stretches(late, enough))
    ranks = [late[a].rank for a, _ in stretches]
    if len(stretches) >= _TURNS and len(set(ranks)) > 1:
        stretches = []
    out = [_straggler(late[a].rank, late[a : b + 1]) for a, b in stretches]
    rest = [each for i, each in enumerate(late) if not any(a <= i <= b for a, b in stretches)]
    uneven = [each for each in rest if each.rank != NOBODY]
    if len(uneven) >= max(enough, _OFTEN * len(rest)):
        out.append(_rotating(rest, uneven))
    return sorted(out, key=lambda each: -each.cost_s_per_step * each.steps)


def _late(step: StepCalls) -> _Late:
    waiting = step.waiting
    rank = min(waiting, key=lambda rank: waiting[rank])
    cost = statistics.median(s for other, s in waiting.items() if other != rank) - waiting[rank]
    return _Late(step, rank if cost >= SILENT * step.seconds else NOBODY, cost)


def _beyond_chance(ranks: int, steps: int) -> float:
    """How many steps a rank has to be late more often than not, that this is no chance where all are late alike.

    By a step a sum goes up 1 with the chance p = 1/ranks, and down _PENALTY otherwise. It ever comes to m with a chance
    below x^-m from each of its steps, where p x + (1 - p) x^-_PENALTY = 1 (Wald's identity).
    """
    p, low, high = 1.0 / ranks, 1.0 + 1e-9, float(ranks)
    for _ in range(60):  # the sum of both is below 1 between the two roots, of which 1 is the other
        middle = (low + high) / 2
        low, high = (middle, high) if p * middle + (1 - p) * middle**-_PENALTY < 1 else (low, middle)
    return math.log(ranks * max(steps, 2) / _CHANCE) / math.log(low)


def _stretches(late: Sequence[_Late], enough: float) -> list[tuple[int, int]]:
    """From where to where one rank is late again and again; they do not overlap."""
    chosen: list[tuple[int, int]] = []
    free = [(0, len(late) - 1)]
    while free:
        first, last = free.pop()
        if last < first:
            continue
        often = Counter(each.rank for each in late[first : last + 1])
        ranks = [rank for rank, count in often.items() if rank != NOBODY and count >= enough]
        sums = [_longest(late, rank, first, last) for rank in ranks]
        best = max(sums, default=(0.0, 0, 0))
        if best[0] >= enough:
            chosen.append(best[1:])
            free += [(first, best[1] - 1), (best[2] + 1, last)]
    return chosen


def _longest(late: Sequence[_Late], rank: int, first: int, last: int) -> tuple[float, int, int]:
    """The stretch in which this rank is late most often: (its sum, from, to)."""
    best, total, begun = (0.0, first, first), 0.0, first
    for i in range(first, last + 1):
        if total <= 0:
            total, begun = 0.0, i
        total += 1.0 if late[i].rank == rank else -_PENALTY
        if total > best[0]:
            best = total, begun, i
    return best


def _straggler(rank: int, late: Sequence[_Late]) -> Straggler:
    mine = [each for each in late if each.rank == rank]
    usual = statistics.median(each.cost for each in mine)
    # Where it begins, chance adds a step in which the rank was the last by little.
    first = next(i for i, each in enumerate(late) if each.rank == rank and each.cost >= _MOSTLY * usual)
    late, mine = late[first:], [each for each in late[first:] if each.rank == rank]
    phase, excess = _phase([(each.at, rank) for each in mine])
    module = _module([(each.at, rank) for each in mine], phase, excess)
    return _said(rank, late, mine, phase, module)


def _rotating(late: Sequence[_Late], uneven: Sequence[_Late]) -> Straggler:
    phase, _ = _phase([(each.at, each.rank) for each in uneven])
    return _said(NOBODY, late, uneven, phase, "")


def _said(rank: int, late: Sequence[_Late], uneven: Sequence[_Late], phase: str, module: str) -> Straggler:
    cost = statistics.fmean(max(0.0, each.cost) for each in late)
    step = statistics.fmean(each.at.seconds for each in late)
    return Straggler(
        rank, phase, module, uneven[0].at.step, cost, cost / step if step else 0.0, rank == NOBODY,
        uneven[-1].at.step, len(uneven),
    )  # fmt: skip


def _phase(blamed: Sequence[tuple[StepCalls, int]]) -> tuple[str, float]:
    """The part of a step in which those who are blamed take longer than the others, and how many seconds: where one
    part is most of it."""
    more = {phase: statistics.fmean(_more(step, rank, phase) for step, rank in blamed) for phase in PHASES}
    phase = max(more, key=lambda phase: more[phase])
    whole = sum(max(0.0, seconds) for seconds in more.values())
    return (phase, more[phase]) if more[phase] > _MOSTLY * whole else ("", 0.0)


def _more(step: StepCalls, rank: int, phase: str) -> float:
    """Seconds that a rank's own work takes more in a part of the step than that of the others."""
    others = [each.seconds.get(phase, 0.0) for other, each in step.ranks.items() if other != rank]
    return step.ranks[rank].seconds.get(phase, 0.0) - statistics.median(others)


def _module(blamed: Sequence[tuple[StepCalls, int]], phase: str, excess: float) -> str:
    """The module that is to blame for most of a part's excess: as it was timed, else as arrivals tell."""
    if phase not in ("forward", "backward"):
        return ""
    timed = [(step, rank) for step, rank in blamed if step.ranks[rank].modules]
    if not timed:
        return _by_arrivals(blamed, phase)
    sums: Counter[str] = Counter()
    for step, rank in timed:
        sums.update(_modules_more(step.ranks, rank, 0 if phase == "forward" else 1))
    name, seconds = max(sums.items(), key=lambda pair: pair[1])
    return name if seconds / len(timed) > _MOSTLY * excess else ""


def _modules_more(ranks: Mapping[int, RankStep], rank: int, at: int) -> dict[str, float]:
    """Seconds that each module takes more on a rank than the same one on others; where no other has it, than its like:
    `blocks.3.mlp` than other `blocks.*.mlp`."""
    others = [each.modules for other, each in ranks.items() if other != rank]
    alike: dict[str, list[float]] = {}
    for modules in (*others, ranks[rank].modules):
        for name, pair in modules.items():
            alike.setdefault(_kind(name), []).append(pair[at])
    more = {}
    for name, pair in ranks[rank].modules.items():
        same = [modules[name][at] for modules in others if name in modules]
        more[name] = pair[at] - statistics.median(same or alike[_kind(name)])
    return more


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _by_arrivals(blamed: Iterable[tuple[StepCalls, int]], phase: str) -> str:
    """The module whose gradients a rank was late with, where several calls of the part tell: between that call and the
    one before it fell behind most."""
    votes: Counter[str] = Counter()
    for step, rank in blamed:
        behind, worst, name, calls = 0.0, 0.0, "", 0
        for call in step.meetings:
            if call.phase != phase or rank not in call.arrived:
                continue
            calls += 1
            now = call.arrived[rank] - statistics.median(s for r, s in call.arrived.items() if r != rank)
            if now - behind > worst:
                worst, name = now - behind, call.module
            behind = now
        votes[name if calls > 1 and worst > _MOSTLY * behind else ""] += 1
    name, count = max(votes.items(), key=lambda pair: pair[1])
    return name if count > _MOSTLY * sum(votes.values()) else ""

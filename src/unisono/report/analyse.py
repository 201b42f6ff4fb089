"""The numbers of a report, from what was measured: shares of a step, slowest rank, bubble, verdict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from unisono.observe.span import PARTS
from unisono.report.calls import StepCalls, steps
from unisono.report.collect import Record, RunRecord
from unisono.report.pipelines import Pipeline, pipeline_of
from unisono.report.verdict.evidence import BUSY, STACKED, Prices, steady
from unisono.report.verdict.gather import gather
from unisono.report.verdict.judge import RunVerdict, judge, no_price
from unisono.report.verdict.waterfall import UsedPeak, waterfall

T = TypeVar("T")

ROWS = 48  # pages with more ranks than this show groups of neighbours


@dataclass(frozen=True)
class TimeShares:
    """Where one rank's time (or the mean of neighbouring ranks') goes: seconds per step and part."""

    name: str
    place: str
    parts: Mapping[str, float]

    @property
    def wall(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in STACKED)

    @property
    def busy(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in BUSY)


@dataclass(frozen=True)
class Analysis:
    """All that is concluded from a run: its ranks' mean steps, its pipeline if it has one, and what limited it.

    met: its steps with their calls."""

    shares: Sequence[TimeShares]
    pipeline: Pipeline | None
    verdict: RunVerdict
    used: Sequence[UsedPeak] = ()
    met: Sequence[StepCalls] = ()


def analyse(run: RunRecord, price: Prices = no_price) -> Analysis:
    """What a run's record says. price: of changes, by the planner."""
    met = steps(run.ranks)
    evidence = gather(run, met=met)
    losses = waterfall(evidence, price, run.prediction)
    return Analysis(shares(run), pipeline_of(run), judge(evidence, price), losses, met)


def shares(run: RunRecord) -> list[TimeShares]:
    """Mean seconds per step and part, per rank; from the ranks' events, else from the metrics of rank 0."""
    time_shares = [
        TimeShares(f"rank {facts.rank}", facts.place, _mean_parts(steady(facts.steps)))
        for facts in run.ranks
        if facts.steps
    ]
    if not time_shares:
        records = [r for r in steady(run.steps) if isinstance(r.get("time"), dict)]
        time_shares = [TimeShares("rank 0", "", _mean_parts(records))] if records else []
    return [share for share in time_shares if share.wall > 0]


def grouped(time_shares: Sequence[TimeShares], limit: int = ROWS) -> list[TimeShares]:
    """At most `limit` shares: neighbours are averaged where there are more."""
    if len(time_shares) <= limit:
        return list(time_shares)
    return [
        TimeShares(
            name=f"{group[0].name.replace('rank', 'ranks')} to {group[-1].name.split()[-1]}"
            if len(group) > 1
            else group[0].name,
            place="",
            parts={part: statistics.fmean(s.parts.get(part, 0.0) for s in group) for part in PARTS},
        )
        for group in dealt(time_shares, limit)
    ]


def dealt(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most `most` groups of neighbours."""
    size = -(-len(items) // most)
    return [items[i : i + size] for i in range(0, len(items), size)]


def bytes_table(run: RunRecord) -> list[tuple[str, str, float]]:
    """(axis, operation, bytes per step summed over ranks), largest first."""
    sent = ((key.partition("."), nbytes) for key, nbytes in _a_step(run, "bytes").items())
    return sorted(((axis, op or "(not named)", n) for (axis, _, op), n in sent), key=lambda row: -row[2])


@dataclass(frozen=True, slots=True)
class Posting:
    """A line of the ledger: bytes per step, all ranks together, of one axis, operation, algorithm and codec."""

    axis: str
    op: str
    algorithm: str
    codec: str
    nbytes: float


def ledger(run: RunRecord) -> list[Posting]:
    """What bytes were sent for, largest first; runs of before wrote no algorithm and no codec."""
    measured = _a_step(run, "ledger") or {"/".join((axis, op)): n for axis, op, n in bytes_table(run)}
    rows = []
    for key, nbytes in measured.items():
        axis, op, algorithm, codec = (*key.split("/", 3), "", "", "")[:4]
        rows.append(Posting(axis, op, algorithm, codec, nbytes))
    return sorted(rows, key=lambda row: -row.nbytes)


def _a_step(run: RunRecord, name: str) -> dict[str, float]:
    """Numbers by key, which each rank told under `name` in each step: summed over ranks, of a mean steady step."""
    sums: dict[str, float] = {}
    for facts in run.ranks:
        records = steady(facts.steps)
        mine: dict[str, float] = {}
        for record in records:
            sent = record.get(name)
            for key, nbytes in sent.items() if isinstance(sent, dict) else ():
                mine[key] = mine.get(key, 0) + (nbytes if isinstance(nbytes, int | float) else 0)
        for key, nbytes in mine.items():
            sums[key] = sums.get(key, 0.0) + nbytes / len(records)
    return sums


def peak_memory(run: RunRecord) -> list[tuple[str, float]]:
    """(rank, most MiB seen)."""
    rows = []
    for facts in run.ranks:
        sizes = [r["mem_mib"] for r in facts.steps if isinstance(r.get("mem_mib"), int | float)]
        if sizes:
            rows.append((f"rank {facts.rank}", float(max(sizes))))
    if not rows:
        sizes = [r["mem_mib"] for r in run.steps if isinstance(r.get("mem_mib"), int | float)]
        rows = [("rank 0", float(max(sizes)))] if sizes else []
    return rows


def _mean_parts(records: Sequence[Record]) -> dict[str, float]:
    def mean(part: str) -> float:
        numbers = [r["time"][part] for r in records if isinstance(r["time"].get(part), int | float)]
        return sum(numbers) / len(records) if records else 0.0

    return {part: mean(part) for part in PARTS}

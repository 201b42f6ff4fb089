"""The numbers of a report, from what was measured: shares of a step, slowest rank, bubble, verdict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from unisono.observe.span import PARTS, Span
from unisono.observe.trace import Trace
from unisono.programs.pipeline import Placed, Timetable, bubble, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.report.collect import Record, RunRecord
from unisono.report.placed import computed, from_zero
from unisono.spec.errors import UsageError
from unisono.spec.words import percent, whole

T = TypeVar("T")

STACKED = tuple(part for part in PARTS if part != "comm_hidden")  # these add up to a step's wall time
WORK = ("forward", "backward", "optim")
BUSY = ("data", "forward", "backward", "optim", "other")
_REMEDIES = {
    "communication": "A larger global batch, or fewer ranks per replica, sends less per sample.",
    "its input": "The ranks wait for their samples: look at the data source and its host's disk.",
}
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
class Finding:
    """What limited a run: one sentence, what to try, and the fractions of a step it rests on."""

    sentence: str
    advice: str = ""
    fractions: Mapping[str, float] | None = None
    slowest: str = ""


@dataclass(frozen=True)
class Pipeline:
    """One step's timetable as planned (with measured costs) and as it happened; seconds from its start."""

    schedule: str
    rows: tuple[str, ...]
    planned: tuple[Placed, ...]
    measured: tuple[Placed, ...]
    planned_bubble: float
    measured_bubble: float
    ideal_bubble: float
    step: int
    replica: str = ""


@dataclass(frozen=True)
class Analysis:
    """All that is concluded from a run: its ranks' mean steps, its pipeline if it has one, and what limited it."""

    shares: Sequence[TimeShares]
    pipeline: Pipeline | None
    finding: Finding


def analyse(run: RunRecord) -> Analysis:
    """What a run's record says."""
    time_shares, pipeline = shares(run), pipeline_of(run)
    return Analysis(time_shares, pipeline, judge(run, time_shares, pipeline))


def steady(records: Sequence[Record]) -> Sequence[Record]:
    """The steps without the first tenth (at least one, at most ten): they pay for warming up."""
    return records[min(10, max(1, len(records) // 10)) :] if len(records) > 2 else records


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


def judge(run: RunRecord, time_shares: Sequence[TimeShares], pipeline: Pipeline | None) -> Finding:
    """One sentence on what limited the run; every number in it is a mean over the ranks' steady steps.

    In this order: ranks that share too few cores, a rank that holds the others up, a quarter of a step or more
    lost to one overhead, and otherwise the compute itself.
    """
    if run.error:
        return Finding(f"The run ended with an error: {run.error.get('what', 'no reason was written down')}.")
    if not time_shares:
        return Finding("Nothing was measured, so nothing can be said about what limited this run.")
    wall = statistics.fmean(share.wall for share in time_shares)
    fractions = {
        part: statistics.fmean(share.parts.get(part, 0.0) for share in time_shares) / wall for part in PARTS
    }
    compute = sum(fractions[part] for part in WORK)
    slowest, lost = _slowest(time_shares)
    overheads = {
        "the pipeline's bubble" if pipeline is not None else "waiting": fractions["wait"],
        "communication": fractions["comm_exposed"],
        "its input": fractions["data"],
        "work outside the parts of a step": fractions["other"],
    }
    worst = max(overheads, key=lambda name: overheads[name])
    cores = _crowded_cores(run, time_shares)
    if cores:
        slowest = ""  # who gets a core when is chance: no rank is to blame
        limiter = f"this machine's cores, {cores} for {len(time_shares)} ranks"
    elif slowest and lost >= 0.1 * wall:
        limiter = slowest
    else:
        limiter = worst if overheads[worst] >= 0.25 else "compute"
    said = [f"compute {percent(compute)} of a step"]
    if slowest:
        who = "it" if limiter == slowest else f"the slowest, {slowest}"
        said.append(f"the others wait {percent(lost / wall)} for {who}")
    elif fractions["wait"] >= 0.01:
        said.append(f"waiting {percent(fractions['wait'])}")
    if pipeline is not None:
        said.append(f"the pipeline's bubble {percent(pipeline.measured_bubble)}")
    if len(time_shares) > 1:
        said.append(f"exposed communication {percent(fractions['comm_exposed'])}")
    if fractions["data"] >= 0.02:
        said.append(f"input {percent(fractions['data'])}")
    sentence = f"Limited by {limiter}: {', '.join(said)}."
    return Finding(sentence, _advice(run, limiter, slowest, pipeline), fractions, slowest)


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


def traced_step(traces: Sequence[Trace]) -> int | None:
    """The last step that most traces hold: the one to draw; None if no span names a step."""
    counts: dict[int, int] = {}
    for trace in traces:
        for step in {s.tags["step"] for s in trace.spans if isinstance(s.tags.get("step"), int)}:
            counts[step] = counts.get(step, 0) + 1
    most = max(counts.values(), default=0)
    return max((step for step, count in counts.items() if count == most), default=None)


def chosen(traces: Sequence[Trace], limit: int) -> list[Trace]:
    """At most `limit` traces, evenly spread over the ranks, so that all stages are among them."""
    if len(traces) <= limit:
        return list(traces)
    return [traces[i * (len(traces) - 1) // (limit - 1)] for i in range(limit)]


def spans_of(trace: Trace, step: int | None) -> list[Span]:
    """The spans of one step (all, if no step is named), by start."""
    spans = [s for s in trace.spans if step is None or s.tags.get("step") == step]
    return sorted(spans, key=lambda s: (s.start_ns, -s.stop_ns))


def pipeline_of(run: RunRecord) -> Pipeline | None:
    """Planned and measured timetable of the traced step, for its slowest replica; None without `pp`.

    The plan is played with the mean measured cost of each stage, so the two differ only by what the plan
    does not know: communication, jitter, ranks that disturb each other.
    """
    name, ranks, micros = _timetable_words(run)
    step = traced_step(run.traces)
    if ranks < 2:
        return None
    replica, happened = _measured(run, step)
    if not happened:
        return None
    micros = max(micros, 1 + max(p.action.micro for p in happened))
    try:
        timetable: Timetable = SCHEDULES.read(name).timetable(ranks, micros)
    except (UsageError, TypeError):
        return None
    forward, backward = (
        _stage_costs(happened, "F", timetable.stages),
        _stage_costs(happened, "B", timetable.stages),
    )
    planned = play_costs(timetable, forward, backward)
    return Pipeline(
        schedule=name,
        rows=tuple(f"pp={row}" for row in range(ranks)),
        planned=tuple(planned),
        measured=tuple(happened),
        planned_bubble=bubble(planned, ranks),
        measured_bubble=bubble(happened, ranks),
        ideal_bubble=bubble(play_costs(timetable, 1.0, 2.0), ranks),
        step=step if step is not None else 0,
        replica=replica,
    )


def _measured(run: RunRecord, step: int | None) -> tuple[str, list[Placed]]:
    """The forwards and backwards of the replica that took longest, and its place on the other axes."""
    places = {facts.rank: facts.coords for facts in run.ranks}
    replicas: dict[str, list[Placed]] = {}
    for trace in run.traces:
        coords = places.get(trace.rank, {})
        replica = " ".join(f"{axis}={at}" for axis, at in coords.items() if axis != "pp")
        replicas.setdefault(replica, []).extend(computed(spans_of(trace, step), coords.get("pp")))
    replicas = {name: placed for name, placed in replicas.items() if placed}
    if not replicas:
        return "", []
    name = max(
        replicas, key=lambda name: max(p.stop for p in replicas[name]) - min(p.start for p in replicas[name])
    )
    return name if len(replicas) > 1 else "", from_zero(replicas[name])


def _stage_costs(placed: Sequence[Placed], kind: str, stages: int) -> list[float]:
    every = [p.stop - p.start for p in placed if p.action.kind == kind] or [0.0]
    costs = []
    for stage in range(stages):
        mine = [p.stop - p.start for p in placed if p.action.kind == kind and p.action.stage == stage]
        costs.append(statistics.fmean(mine or every))
    return costs


def _timetable_words(run: RunRecord) -> tuple[str, int, int]:
    """(schedule, ranks, micros) from the summary, or else from the plan; one rank means no pipeline."""
    words: Record = {key: value for key, _, value in (word.partition("=") for word in run.plan.split())}
    words["ranks"] = words.get("pp", 1)
    timetable = run.summary.get("timetable")
    if isinstance(timetable, dict):
        words.update({key: value for key, value in timetable.items() if value is not None})
    return str(words.get("schedule", "1f1b")), _whole(words["ranks"], 1), _whole(words.get("micros"), 0)


def _whole(value: object, otherwise: int) -> int:
    number = whole(str(value)) if isinstance(value, int | str) else None
    return otherwise if number is None else number


def _slowest(time_shares: Sequence[TimeShares]) -> tuple[str, float]:
    """(name, seconds that others wait more than it does) of a rank that holds others up; else ("", 0)."""
    if len(time_shares) < 2:
        return "", 0.0
    slow = max(time_shares, key=lambda share: share.busy)
    others = [share for share in time_shares if share is not slow]
    lost = statistics.fmean(_idle(share) for share in others) - _idle(slow)
    behind = slow.busy / (statistics.median(share.busy for share in others) or slow.busy)
    if behind < 1.05 or lost < 0.02 * slow.wall:
        return "", 0.0
    return (f"{slow.name} ({slow.place})" if slow.place else slow.name), lost


def _idle(share: TimeShares) -> float:
    return share.parts.get("wait", 0.0) + share.parts.get("comm_exposed", 0.0)


def _crowded_cores(run: RunRecord, time_shares: Sequence[TimeShares]) -> int:
    """The cores of the one host, if its ranks keep more than them busy; else 0."""
    cores = run.environment.get("cores_usable") or run.environment.get("cores")
    if (
        not isinstance(cores, int)
        or len(time_shares) <= cores
        or len({facts.host for facts in run.ranks}) > 1
    ):
        return 0
    # What a rank calls busy includes the time in which another one had its core.
    return (
        cores
        if sum(share.busy for share in time_shares) / max(share.wall for share in time_shares) > 0.9 * cores
        else 0
    )


def _advice(run: RunRecord, limiter: str, slowest: str, pipeline: Pipeline | None) -> str:
    if limiter.startswith("this machine's cores"):
        return "Waiting costs little here: a rank that waits lends its core to the others."
    if slowest:
        return f"Look at {slowest}: a heavier stage, a busier host, or slower hardware."
    if limiter == "the pipeline's bubble" and pipeline is not None:
        name, stages, micros = _timetable_words(run)
        more = 2 * max(micros, 1 + max(p.action.micro for p in pipeline.measured))
        smaller = bubble(play_costs(SCHEDULES.read(name).timetable(stages, more), 1.0, 2.0), stages)
        return f"With micros={more} the timetable alone would idle {percent(smaller)}."
    return _REMEDIES.get(limiter, "")


def _mean_parts(records: Sequence[Record]) -> dict[str, float]:
    def mean(part: str) -> float:
        numbers = [r["time"][part] for r in records if isinstance(r["time"].get(part), int | float)]
        return sum(numbers) / len(records) if records else 0.0

    return {part: mean(part) for part in PARTS}

"""Causes that lie between ranks: communication, the pipeline, who is late."""

import statistics
from collections.abc import Callable, Sequence

from unisono.report.stragglers import Straggler
from unisono.report.verdict.costs import Candidate, CauseCase, called, mean, said, share
from unisono.report.verdict.evidence import RunEvidence, StepSeen
from unisono.spec.words import nbytes, percent, seconds

_MANY_CALLS = 8
_SMALL_CALL = 1 << 18


def _moving(case: CauseCase) -> tuple[float, str]:
    """(exposed seconds of a mean step in which data moves, the axis that most of it is on): the last rank to come waits
    for nobody, so what it calls communication moves."""
    rows = case.evidence.rows
    least = sum(min(step.parts.get("comm_exposed", 0.0) for step in row) for row in rows) / max(1, len(rows))
    if case.evidence.cores:  # on one host ranks send by its cores: what waits for a core is no link's fault
        least = max(0.0, least - case.evidence.beside("queue_s"))
    spread = {axis: part for axis, part in case.evidence.spread.items() if axis != "pp"}
    return least, max(spread, key=spread.__getitem__, default=_replicas(case.evidence))


def _replicas(evidence: RunEvidence) -> str:
    return next((axis for axis in ("dp", "shard", "tp", "cp") if evidence.size(axis) > 1), "dp")


def _communication(case: CauseCase) -> Candidate | None:
    evidence = case.evidence
    if all(evidence.size(axis) == 1 for axis in ("dp", "shard", "tp", "cp")):
        return None
    cost, axis = _moving(case)
    mine = [call for call in evidence.calls if call.axis == axis]
    count, size = sum(call.count for call in mine), sum(call.nbytes for call in mine)
    rows = [f"communication on {axis} that nothing hides takes {share(case, cost)}"]
    if count:
        rows.append(f"{count:.0f} calls a step on {axis}, {nbytes(size / count)} each")
    if count >= _MANY_CALLS and size / count <= _SMALL_CALL and axis == "dp":
        return _buckets(case, cost, count, size, rows)
    if axis != "dp":
        return Candidate("communication", cost, cost / 2, advice=f"Fewer ranks on {axis}, or a faster link between.",
                         evidence=rows, phase=axis)  # fmt: skip
    if evidence.plan.get("codec", "plain") == "plain" and evidence.plan.get("sync", "every_step").startswith(
        "every_step"
    ):
        change, advice = (
            said(case, {"codec": "int8+ef"}),
            (
                "int8 sends a quarter of the bytes; error feedback carries its error on (LOSSY). sync=diloco:h=30 "
                "sends them once in 30 steps, a larger global batch for more samples."
            ),
        )
        return Candidate("communication", cost, 0.7 * cost, change, advice, rows, phase=axis)
    return Candidate("communication", cost, cost / 2, advice="A larger global batch sends less a sample.",
                     evidence=rows, phase=axis)  # fmt: skip


def _buckets(case: CauseCase, cost: float, count: float, size: float, rows: list[str]) -> Candidate:
    """Calls so small that each is little but its own latency: as few as 25 MiB make have only theirs."""
    few = max(1.0, size / (25 << 20))
    gain = cost * (1 - few / count)
    sync = case.evidence.plan.get("sync", "every_step").partition(":")[0]
    return Candidate(
        "small buckets", cost, gain, said(case, {"sync": f"{sync}:bucket=25"}),
        "Fewer, larger buckets: each call has its latency, however little it carries.", rows, phase="dp",
    )  # fmt: skip


def _bubble(case: CauseCase) -> Candidate | None:
    evidence, seen = case.evidence, case.evidence.bubble
    if evidence.size("pp") < 2:
        return None
    cost = evidence.part("wait") + evidence.part("comm_exposed") * evidence.spread.get("pp", 0.0)
    if evidence.late and _slower_than_peers(evidence, evidence.late[0]):  # stages wait for it too
        cost = max(0.0, cost - evidence.late[0].cost_s_per_step)
    if seen is None:
        return Candidate(
            "pipeline bubble", cost, evidence=[f"ranks wait for their neighbours {share(case, cost)}"],
            measure="a traced step: --train.trace_steps 3 tells uneven stages from too few micro-batches",
        )  # fmt: skip
    rows = [
        f"the pipeline idles {percent(seen.measured)}: {percent(seen.planned)} by its timetable with the measured "
        f"stages, {percent(seen.ideal)} with equal ones",
        "a micro-batch takes its stages " + ", ".join(seconds(stage) for stage in seen.stages),
    ]
    if seen.planned - seen.ideal > 0.4 * seen.measured and max(seen.stages) > 1.15 * min(seen.stages):
        mean = sum(seen.stages) / len(seen.stages)
        gain = min(cost, (evidence.wall - cost) * (1 - mean / max(seen.stages))) * 0.8
        schedule = evidence.plan.get("schedule", "1f1b").partition(":")[0]
        change = said(case, {"schedule": f"{schedule}:cut=measured"})
        return Candidate("uneven stages", cost, gain, change, "Stages of equal time.", rows, phase="wait")
    micros = 2 * evidence.size("micros")
    gain = evidence.wall * max(0.0, seen.ideal - seen.better)
    change = f"{said(case, {'micros': micros})} --train.micro_batch {_halved(evidence)}"
    return Candidate("pipeline bubble", cost, gain, change, "More, smaller micro-batches fill the pipeline.", rows,
                     "the timetable with equal stages", phase="wait", priced=True)  # fmt: skip


def _halved(evidence: RunEvidence) -> int:
    size = evidence.setting("train", "micro_batch")
    return max(1, size // 2) if isinstance(size, int) else 1


def _straggler(case: CauseCase) -> Candidate | None:
    """Ranks that wait for a late one, who is late for no reason that is a cause of its own."""
    evidence = case.evidence
    if not evidence.late:
        return None
    late = evidence.late[0]
    if evidence.size("pp") > 1 and not _slower_than_peers(evidence, late):
        return None  # a stage with more to do
    who = next((rank for rank in evidence.ranks if rank.rank == late.rank), None)
    stretch = late.steps / max(1, len(evidence.numbers)) if late.rotating else _within(evidence, late)
    cost = max(0.0, late.cost_s_per_step - _excused(evidence, late)) * min(1.0, stretch)
    if who is None:
        return Candidate(
            "rotating stragglers", cost,
            evidence=[f"ranks take turns to be late, and the others wait {share(case, cost)}"],
            advice="No rank is to blame.", phase=late.phase, module=late.module, since=late.since_step,
            until=late.until_step,
            measure="the same run on quiet cores, or with a core for each rank",
        )  # fmt: skip
    between = _longer(evidence, late, "between")
    phase = "between" if between > late.cost_s_per_step / 2 else late.phase
    where = late.module or {"": "its steps", "between": "what it does between two steps"}.get(phase, phase)
    rows = [
        f"the others wait for {who.name}, late in {where}, {share(case, cost)}, from step {late.since_step} to "
        f"{late.until_step}"
    ]
    cause, change = "straggler", ""
    advice = f"Look at {who.name} in {where}: other work than its peers', a busier host, slower hardware."
    if phase == "between":
        cause, change = "python", "--callbacks.call []" if called(evidence) else ""
        advice = (
            f"What {who.name} does between two steps holds the others up: make it rarer, or do it elsewhere."
        )
    return Candidate(cause, cost, cost, change, advice, rows, phase=phase, module=late.module, rank=who.rank,
                     since=late.since_step, until=late.until_step)  # fmt: skip


def _slower_than_peers(evidence: RunEvidence, late: Straggler) -> bool:
    """Whether a late rank works longer than the ranks of its own stage, which have as much to do."""
    who = next((rank for rank in evidence.ranks if rank.rank == late.rank), None)
    if who is None:
        return False
    peers = [
        rank for rank in evidence.ranks if rank.coords.get("pp") == who.coords.get("pp") and rank is not who
    ]
    busy = lambda rank: mean(
        step.busy for step in rank.steps if late.since_step <= step.step <= late.until_step
    )
    return bool(peers) and busy(who) - statistics.median(map(busy, peers)) >= late.cost_s_per_step / 2


def _within(evidence: RunEvidence, late: Straggler) -> float:
    """The share of all steps from the first to the last of a straggler's."""
    return sum(late.since_step <= step <= late.until_step for step in evidence.numbers) / len(
        evidence.numbers
    )


def _longer(evidence: RunEvidence, late: Straggler, part: str) -> float:
    """Seconds that the late rank's part of a step takes more than the others' median, in its steps."""
    rows = [row for row in evidence.rows if late.since_step <= row[0].step <= late.until_step]
    at = next(place for place, rank in enumerate(evidence.ranks) if rank.rank == late.rank)
    return mean(_more([step.parts.get(part, 0.0) for step in row], at) for row in rows if len(row) > 1)


def _excused(evidence: RunEvidence, late: Straggler) -> float:
    """Seconds that a late rank had no core, or collected garbage, longer than the others: causes of their own."""

    def excuse(step: StepSeen) -> float:
        return step.beside.get("queue_s", 0.0) + step.beside.get("gc_s", 0.0)

    if late.rotating:  # who takes turns with other programs for a core is late in turns
        return evidence.beside("queue_s") + evidence.beside("gc_s")
    places = {rank.rank: at for at, rank in enumerate(evidence.ranks)}
    rows = [
        row for row in evidence.rows if late.since_step <= row[0].step <= late.until_step and len(row) > 1
    ]
    who = lambda row: places.get(late.rank, min(range(len(row)), key=lambda at: row[at].idle))
    return max(0.0, mean(_more([excuse(step) for step in row], who(row)) for row in rows))


def _more(values: Sequence[float], at: int) -> float:
    return values[at] - statistics.median(value for place, value in enumerate(values) if place != at)


BETWEEN: tuple[Callable[[CauseCase], Candidate | None], ...] = (_communication, _bubble, _straggler)

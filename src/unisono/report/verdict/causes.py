"""Each thing that can make a step longer than it need be: what it costs by the figures, and what to change.

A function a cause: it reads the evidence and returns what it costs in seconds of a mean step, or None where the figures
say nothing of it. No cost is counted under two causes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.report.verdict.evidence import Prices, RunEvidence
from unisono.report.verdict.stragglers import Lateness, lateness
from unisono.spec.words import nbytes, percent, seconds

TINY = 25e-6
"""Seconds: an operation that takes less is mostly its own start."""
_MANY_CALLS = 8
_SMALL_CALL = 1 << 18


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one cause takes of a step. cost: seconds of a mean step. gain: seconds that the change would save of it.
    change: flags as typed, or "" where no key changes it. advice: in words. by: what the gain rests on."""

    cause: str
    cost: float
    gain: float = 0.0
    change: str = ""
    advice: str = ""
    evidence: Sequence[str] = ()
    by: str = "the part measured"
    phase: str = ""
    module: str = ""
    rank: int | None = None
    since: int | None = None
    until: int | None = None
    measure: str = ""
    priced: bool = False  # whether the planner's price of the change is worth more than the gain here


@dataclass(frozen=True, slots=True)
class Case:
    """What causes look at: the figures, the planner's prices if there are any, and who was late."""

    evidence: RunEvidence
    price: Prices
    late: Lateness | None = field(default=None)


def candidates(evidence: RunEvidence, price: Prices) -> list[Candidate]:
    """All causes that cost anything, the dearest first."""
    case = Case(evidence, price, lateness(evidence))
    every = (cause(case) for cause in CAUSES)
    return sorted((one for one in every if one is not None and one.cost > 0), key=lambda one: -one.cost)


def said(case: Case, words: Mapping[str, str | int]) -> str:
    """The flag that sets words of the plan: the others stay as they are."""
    plan = {**case.evidence.plan, **{key: str(value) for key, value in words.items()}}
    return '--plan "' + " ".join(f"{key}={value}" for key, value in plan.items()) + '"'


def _share(case: Case, cost: float) -> str:
    return f"{seconds(cost)} of a step of {seconds(case.evidence.period)} ({percent(cost / case.evidence.period)})"


def _input(case: Case) -> Candidate | None:
    """Waiting for samples, on all ranks alike: what one rank waits longer is its own lateness."""
    rows = case.evidence.rows
    cost = sum(min(step.parts.get("data", 0.0) for step in row) for row in rows) / max(1, len(rows))
    workers = case.evidence.setting("data", "workers")
    return Candidate(
        "input",
        cost,
        0.8 * cost,
        phase="data",
        advice="Read ahead of the step, cheaper samples, or a faster disk: the ranks wait for their samples."
        + (f" data.workers is {workers}." if workers else ""),
        evidence=[f"all ranks wait for samples {_share(case, cost)}"],
    )


def _moving(case: Case) -> tuple[float, str]:
    """(exposed seconds of a mean step in which data moves, the axis that most of it is on): the last rank to come waits
    for nobody, so what it calls communication moves."""
    rows = case.evidence.rows
    least = sum(min(step.parts.get("comm_exposed", 0.0) for step in row) for row in rows) / max(1, len(rows))
    spread = {axis: part for axis, part in case.evidence.spread.items() if axis != "pp"}
    return least, max(spread, key=spread.__getitem__, default=_replicas(case.evidence))


def _replicas(evidence: RunEvidence) -> str:
    return next((axis for axis in ("dp", "shard", "tp", "cp") if evidence.size(axis) > 1), "dp")


def _communication(case: Case) -> Candidate | None:
    evidence = case.evidence
    if len(evidence.ranks) < 2 or evidence.size("pp") == len(evidence.ranks):
        return None
    cost, axis = _moving(case)
    mine = [call for call in evidence.calls if call.axis == axis]
    count, size = sum(call.count for call in mine), sum(call.nbytes for call in mine)
    rows = [f"communication on {axis} that nothing hides takes {_share(case, cost)}"]
    if count:
        rows.append(f"{count:.0f} calls a step on {axis}, {nbytes(size / count)} each")
    if count >= _MANY_CALLS and size / count <= _SMALL_CALL and axis == "dp":
        return _buckets(case, cost, count, size, rows)
    if axis != "dp":
        return Candidate("communication", cost, cost / 2, advice=f"Fewer ranks on {axis}, or a faster link between them.",
                         evidence=rows, phase=axis)  # fmt: skip
    if evidence.plan.get("codec", "plain") == "plain" and evidence.plan.get("sync", "every_step").startswith(
        "every_step"
    ):
        change, advice = (
            said(case, {"codec": "int8+ef"}),
            (
                "int8 sends a quarter of the bytes, with an error that error feedback carries on (LOSSY); sync=diloco:h=30 "
                "sends them once in 30 steps; a larger global batch sends them for more samples."
            ),
        )
        return Candidate("communication", cost, 0.7 * cost, change, advice, rows, phase=axis)
    return Candidate("communication", cost, cost / 2, advice="A larger global batch sends less a sample.", evidence=rows,
                     phase=axis)  # fmt: skip


def _buckets(case: Case, cost: float, count: float, size: float, rows: list[str]) -> Candidate:
    """Calls so small that each is little but its own latency: as few as 25 MiB make have only theirs."""
    few = max(1.0, size / (25 << 20))
    gain = cost * (1 - few / count)
    sync = case.evidence.plan.get("sync", "every_step").partition(":")[0]
    return Candidate(
        "small buckets", cost, gain, said(case, {"sync": f"{sync}:bucket=25"}),
        "Fewer, larger buckets: each call has its latency, however little it carries.", rows, phase="dp",
    )  # fmt: skip


def _bubble(case: Case) -> Candidate | None:
    evidence, seen = case.evidence, case.evidence.bubble
    if evidence.size("pp") < 2:
        return None
    cost = evidence.part("wait") + evidence.part("comm_exposed") * evidence.spread.get("pp", 0.0)
    if seen is None:
        return Candidate(
            "pipeline bubble", cost, evidence=[f"ranks wait for their neighbours {_share(case, cost)}"],
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


def _straggler(case: Case) -> Candidate | None:
    late = case.late
    if late is None:
        return None
    if late.rank is None:
        shared = ", ".join(f"{name} {percent(share)}" for name, share in late.shares[:8])
        return Candidate(
            "rotating stragglers", late.cost,
            evidence=[f"ranks wait for the late one {_share(case, late.cost)}, which is now one and now another: {shared}"],
            advice="No rank is to blame: ranks take turns at being late.",
            measure="the same run on quiet cores, or with a core for each rank",
        )  # fmt: skip
    who, of_step = late.rank, percent(late.longer / max(1e-9, case.evidence.period))
    rows = [
        f"the others wait for {who.name} {_share(case, late.cost)}, from step {late.since} to {late.until}",
        f"it takes {seconds(max(0.0, late.longer))} ({of_step} of a step) more than its peers in {late.phase}"
        + (f", in {late.module}" if late.module else ""),
    ]
    where = f" in {late.module}" if late.module else f" in its {late.phase}"
    cause, advice = (
        "straggler",
        f"Look at {who.name}{where}: other work than its peers', a busier host, slower hardware.",
    )
    change = ""
    if late.phase == "between":
        cause, change = "python", "--callbacks.call []" if _called(case.evidence) else ""
        advice = (
            f"What {who.name} does between two steps holds the others up: make it rarer, or do it elsewhere."
        )
    return Candidate(cause, late.cost, late.cost, change, advice, rows, phase=late.phase, module=late.module,
                     rank=who.rank, since=late.since, until=late.until)  # fmt: skip


def _called(evidence: RunEvidence) -> bool:
    return bool(evidence.setting("callbacks", "call"))


def _looks(case: Case) -> tuple[float, float, float, str]:
    """(operations of a step, seconds between them, seconds inside of tiny ones, between which), means of the steps that were
    looked at, which cost more than others: their seconds are those of a usual step's forward and backward."""
    looks, evidence = case.evidence.kernels, case.evidence
    if not looks:
        return 0.0, 0.0, 0.0, ""
    usual = evidence.part("forward") + evidence.part("backward")
    whole = sum(look.inside + look.python for look in looks)
    scale = min(1.0, usual * len(looks) / whole) if whole else 0.0
    mean = scale / len(looks)
    count = sum(look.count for look in looks) / len(looks)
    return (count, mean * sum(look.python for look in looks), mean * sum(look.small for look in looks),
            looks[-1].gap)  # fmt: skip


def _python(case: Case) -> Candidate | None:
    """Time of forward and backward outside of any operation, less what starting so many of them takes."""
    count, between, _, gap = _looks(case)
    starts = min(between, count * _START)
    cost = between - starts
    module = _dearest(case.evidence)
    return Candidate(
        "python", cost, 0.8 * cost, "",
        f"Write the loop{f' in {module}' if module else ''} as tensor operations; --train.compile where it cannot be.",
        [f"{seconds(between)} of forward and backward lie between {count:.0f} operations, most of it {gap or 'anywhere'}, {_share(case, cost)} more "
         "than starting them takes"],
        phase="forward", module=module,
    )  # fmt: skip


def _dearest(evidence: RunEvidence) -> str:
    """The module with the longest own time, "" where none was timed."""
    sums: dict[str, float] = {}
    for rank in evidence.ranks:
        for step in rank.steps:
            for name, spent in step.modules.items():
                sums[name] = sums.get(name, 0.0) + spent
    return max(sums, key=sums.__getitem__, default="")


_START = 12e-6
"""Seconds of Python from one operation to the next in a plain model, `docs/verdict.md` has the command."""


def _tiny(case: Case) -> Candidate | None:
    """Operations that are little but their own start: fewer, larger ones do the same."""
    evidence = case.evidence
    count, between, small, _ = _looks(case)
    cost = small + min(between, count * _START)
    size, micros = evidence.setting("train", "micro_batch"), evidence.size("micros")
    rows = [
        f"{count:.0f} operations a step, of which those below {seconds(TINY)} and what starts them take {_share(case, cost)}"
    ]
    if not isinstance(size, int):
        return Candidate("tiny kernels", cost, cost / 2, "--train.compile", "Fuse them.", rows)
    factor = _factor(micros)
    if factor > 1 and evidence.size("pp") == 1:
        gain = cost * (1 - 1 / factor)
        change = f"{said(case, {'micros': micros // factor})} --train.micro_batch {size * factor}"
        advice = "Fewer, larger micro-batches: the same samples in fewer operations."
        return Candidate("too many micro-batches", cost, gain, change, advice, rows)
    batch = evidence.setting("train", "global_batch")
    change = (
        f"--train.global_batch {4 * batch} --train.micro_batch {4 * size}" if isinstance(batch, int) else ""
    )
    return Candidate("tiny kernels", cost, 0.75 * cost, change, "Larger batches or wider layers: the same operations for more "
                     "samples; the gain is of a step of as many samples.", rows)  # fmt: skip


def _factor(micros: int) -> int:
    """By which number at most 8 micro-batches are put together, which divides them."""
    return max((n for n in range(1, 9) if micros % n == 0), default=1)


def _saves(case: Case) -> Candidate | None:
    evidence = case.evidence
    cost, every = evidence.beside("save_s"), evidence.setting("train", "save_every")
    if not isinstance(every, int) or not every:
        return None
    rarer = max(2, round(cost / (0.02 * evidence.wall))) if evidence.wall else 2
    rows = [f"a save every {every} steps takes {seconds(cost * every)}: {_share(case, cost)}"]
    return Candidate("checkpoints", cost, cost * (1 - 1 / rarer), f"--train.save_every {every * rarer}",
                     "Or --train.async_save, which writes while training goes on.", rows, phase="between")  # fmt: skip


def _validations(case: Case) -> Candidate | None:
    evidence = case.evidence
    cost, every = evidence.beside("eval_s"), evidence.setting("train", "eval_every")
    if not isinstance(every, int) or not every:
        return None
    rows = [f"a validation every {every} steps takes {seconds(cost * every)}: {_share(case, cost)}"]
    return Candidate("validation", cost, 0.75 * cost, f"--train.eval_every {4 * every}", "Or fewer train.eval_batches.",
                     rows, phase="between")  # fmt: skip


def _between(case: Case) -> Candidate | None:
    """What all ranks do between two steps, beside saving and validating."""
    rows = case.evidence.rows
    cost = sum(min(step.parts.get("between", 0.0) for step in row) for row in rows) / max(1, len(rows))
    change = "--callbacks.call []" if _called(case.evidence) else ""
    return Candidate("python", cost, 0.8 * cost, change, "What is called after each step holds training up.",
                     [f"between two steps every rank spends {_share(case, cost)}"], phase="between")  # fmt: skip


def _collector(case: Case) -> Candidate | None:
    rows = case.evidence.rows
    cost = sum(max(step.beside.get("gc_s", 0.0) for step in row) for row in rows) / max(1, len(rows))
    return Candidate(
        "garbage collection", cost, 0.9 * cost, "",
        "Keep fewer objects that live long, or gc.freeze() them before training; gc.disable() and collect between steps.",
        [f"Python's garbage collector takes {_share(case, cost)}"],
    )  # fmt: skip


def _faults(case: Case) -> Candidate | None:
    """Steps in which pages had to be read from a disk: memory that was swapped out, or a mapped file."""
    evidence = case.evidence
    faults = evidence.beside("faults")
    if faults < 1:
        return None
    # A thread that waits for a page has no core and wants none.
    off = evidence.mean(
        lambda s: max(
            0.0,
            s.wall
            - s.beside.get("cpu_s", s.wall)
            - s.beside.get("queue_s", 0.0)
            - s.idle
            - s.parts.get("data", 0.0),
        )
    )
    return Candidate(
        "host memory", off, 0.8 * off, "",
        "Memory that does not fit is read back from a disk in each step: less of it (recompute=full, a smaller micro-batch, "
        "zero=3), more memory, or fewer programs beside this one.",
        [f"{faults:.0f} pages a step are read from a disk, and a rank stands still {_share(case, off)}"],
    )  # fmt: skip


def _recompute(case: Case) -> Candidate | None:
    """What is computed a second time, where the host's memory would hold it: as long as the first time, full."""
    evidence = case.evidence
    mode = evidence.plan.get("recompute", "none").partition(":")[0]
    again = {"full": 1.0, "selective": 0.2}.get(mode, 0.0)
    room = evidence.memory_mib / max(1, len(evidence.ranks))
    if not again or not evidence.peak_mib or evidence.peak_mib > 0.4 * room:
        return None
    cost = again * evidence.part("forward")
    rows = [f"recompute={mode} computes the forward pass again, {_share(case, cost)}",
            f"a rank takes {nbytes(evidence.peak_mib * 2**20)} at most, of {nbytes(room * 2**20)} that it may have"]  # fmt: skip
    return Candidate("needless recompute", cost, 0.9 * cost, said(case, {"recompute": "none"}),
                     "Keep what there is room for.", rows, phase="backward")  # fmt: skip


def _memory(case: Case) -> Candidate | None:
    """The update reads and writes each state once, whatever the batch: it is as fast as memory."""
    evidence = case.evidence
    cost = evidence.part("optim")
    rows = [f"the optimiser's update, which memory bandwidth limits, takes {_share(case, cost)}"]
    dp = evidence.size("dp")
    if dp > 1 and evidence.size("shard") == 1 and evidence.size("pp") == 1:
        change = said(case, {"dp": 1, "shard": dp, "zero": 1})
        return Candidate("memory bandwidth", cost, cost * (1 - 1 / dp), change, "Each rank updates its part.", rows,
                         phase="optim", priced=True)  # fmt: skip
    batch = evidence.setting("train", "global_batch")
    change = f"--train.global_batch {2 * batch}" if isinstance(batch, int) else ""
    return Candidate("memory bandwidth", cost, cost / 2, change, "More samples an update; the gain is of a step of as many.",
                     rows, phase="optim")  # fmt: skip


def _cores(case: Case) -> Candidate | None:
    """A rank was ready to compute, and had no core."""
    evidence = case.evidence
    cost, ranks = evidence.beside("queue_s"), len(evidence.ranks)
    if not evidence.has("queue_s"):
        busy = sum(step.busy for rank in evidence.ranks for step in rank.steps)
        wall = max((sum(s.wall for s in rank.steps) for rank in evidence.ranks), default=0.0)
        if not evidence.cores or ranks <= evidence.cores or busy <= 0.9 * evidence.cores * wall:
            return None
        cost = evidence.wall * (1 - evidence.cores / ranks)
    others = "" if evidence.cores and ranks > evidence.cores else "; other programs have them"
    return Candidate(
        "cores", cost, 0.0, "",
        "Waiting costs little here: a rank that waits lends its core to the others."
        if not others else "Fewer programs beside this one; other figures here are of a busy machine.",
        [f"ranks are ready and wait for a core {_share(case, cost)}: {evidence.cores} cores for {ranks} ranks{others}"],
    )  # fmt: skip


CAUSES: tuple[Callable[[Case], Candidate | None], ...] = (
    _input, _communication, _bubble, _straggler, _python, _tiny, _saves, _validations, _between, _collector,
    _faults, _recompute, _memory, _cores,
)  # fmt: skip

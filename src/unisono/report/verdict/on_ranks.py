"""Causes that lie on each rank: its samples, Python, small operations, what it does between steps, its host."""

import statistics
from collections.abc import Callable

from unisono.report.verdict.costs import Candidate, CauseCase, called, said, share
from unisono.report.verdict.evidence import RunEvidence
from unisono.spec.words import nbytes, seconds

TINY = 60e-6
"""Seconds: an operation that takes less is mostly its own start."""


def _input(case: CauseCase) -> Candidate | None:
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
        evidence=[f"all ranks wait for samples {share(case, cost)}"],
    )


def _looks(case: CauseCase) -> tuple[float, float, float, str]:
    """(operations of a step, seconds between them, inside of tiny ones, between which): medians of the steps that were
    looked at, which take longer than others: their seconds are those of a usual step's forward and backward."""
    looks, evidence = case.evidence.kernels, case.evidence
    if not looks:
        return 0.0, 0.0, 0.0, ""
    usual = evidence.part("forward") + evidence.part("backward")
    count, between, inside, small = (
        statistics.median(getattr(look, name) for look in looks)
        for name in ("count", "python", "inside", "small")
    )
    scale = min(1.0, usual / (inside + between)) if inside + between else 0.0
    return count, scale * between, scale * small, looks[-1].gap


def _python(case: CauseCase) -> Candidate | None:
    """Time of forward and backward outside of any operation, less what starting so many of them takes."""
    count, between, _, gap = _looks(case)
    starts = min(between, count * _START)
    cost = between - starts
    module = _dearest(case.evidence)
    return Candidate(
        "python", cost, 0.8 * cost, "",
        f"Write the loop{f' in {module}' if module else ''} as tensor operations; --train.compile where it cannot be.",
        [f"{seconds(between)} of forward and backward lie between {count:.0f} operations, most of it "
         f"{gap or 'anywhere'}, {share(case, cost)} more than starting them takes"],
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


_START = 15e-6
"""Seconds of Python from one operation to the next in a plain model, `docs/verdict.md` has the command."""


def _small(case: CauseCase) -> float:
    """Seconds of a step in small operations, and in what starts operations."""
    count, between, small, _ = _looks(case)
    return small + min(between, count * _START)


def _tiny(case: CauseCase) -> Candidate | None:
    """Operations that are little but their own start: fewer, larger ones do the same."""
    evidence = case.evidence
    count, cost = _looks(case)[0], _small(case)
    size, micros = evidence.setting("train", "micro_batch"), evidence.size("micros")
    rows = [
        f"{count:.0f} operations a step, of which those below {seconds(TINY)} and what starts them take "
        f"{share(case, cost)}"
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
    return Candidate("tiny kernels", cost, 0.75 * cost, change, "Larger batches or wider layers: the same "
                     "operations for more samples; the gain is of a step of as many samples.", rows)  # fmt: skip


def _factor(micros: int) -> int:
    """By which number at most 8 micro-batches are put together, which divides them."""
    return max((n for n in range(1, 9) if micros % n == 0), default=1)


def _saves(case: CauseCase) -> Candidate | None:
    evidence = case.evidence
    cost, every = evidence.beside("save_s"), evidence.setting("train", "save_every")
    if not isinstance(every, int) or not every:
        return None
    rarer = max(2, round(cost / (0.02 * evidence.wall))) if evidence.wall else 2
    rows = [f"a save every {every} steps takes {seconds(cost * every)}: {share(case, cost)}"]
    return Candidate("checkpoints", cost, cost * (1 - 1 / rarer), f"--train.save_every {every * rarer}",
                     "Or --train.async_save, which writes while training goes on.", rows, phase="between")  # fmt: skip


def _validations(case: CauseCase) -> Candidate | None:
    evidence = case.evidence
    cost, every = evidence.beside("eval_s"), evidence.setting("train", "eval_every")
    if not isinstance(every, int) or not every:
        return None
    rows = [f"a validation every {every} steps takes {seconds(cost * every)}: {share(case, cost)}"]
    return Candidate("validation", cost, 0.75 * cost, f"--train.eval_every {4 * every}", "Or fewer train.eval_batches.",
                     rows, phase="between")  # fmt: skip


def _between(case: CauseCase) -> Candidate | None:
    """What all ranks do between two steps, beside saving and validating."""
    rows = case.evidence.rows
    cost = sum(min(step.parts.get("between", 0.0) for step in row) for row in rows) / max(1, len(rows))
    change = "--callbacks.call []" if called(case.evidence) else ""
    return Candidate("python", cost, 0.8 * cost, change, "What is called after each step holds training up.",
                     [f"between two steps every rank spends {share(case, cost)}"], phase="between")  # fmt: skip


def _collector(case: CauseCase) -> Candidate | None:
    rows = case.evidence.rows
    cost = sum(max(step.beside.get("gc_s", 0.0) for step in row) for row in rows) / max(1, len(rows))
    return Candidate(
        "garbage collection", cost, 0.9 * cost, "",
        "Keep fewer objects that live long, gc.freeze() them before training, or collect between steps alone.",
        [f"Python's garbage collector takes {share(case, cost)}"],
    )  # fmt: skip


def _faults(case: CauseCase) -> Candidate | None:
    """Steps in which pages had to be read from a disk: memory that was swapped out, or a mapped file."""
    evidence = case.evidence
    faults = evidence.beside("faults")
    if faults < 1:
        return None
    off = evidence.mean(lambda step: step.paging)
    return Candidate(
        "host memory", off, 0.8 * off, "",
        "Memory that does not fit is read back from a disk in each step: less of it (recompute=full, a smaller "
        "micro-batch, zero=3), more memory, or fewer programs beside this one.",
        [f"{faults:.0f} pages a step are read from a disk, and a rank stands still {share(case, off)}"],
    )  # fmt: skip


def _recompute(case: CauseCase) -> Candidate | None:
    """What is computed a second time, where the host's memory would hold it: as long as the first time, full."""
    evidence = case.evidence
    mode = evidence.plan.get("recompute", "none").partition(":")[0]
    again = {"full": 1.0, "selective": 0.2}.get(mode, 0.0)
    room = evidence.memory_mib / max(1, len(evidence.ranks))
    if not again or not evidence.peak_mib or evidence.peak_mib > 0.4 * room:
        return None
    cost = again * evidence.part("forward")
    rows = [f"recompute={mode} computes the forward pass again, {share(case, cost)}",
            f"a rank takes {nbytes(evidence.peak_mib * 2**20)} at most, of {nbytes(room * 2**20)} that "
            "it may have"]  # fmt: skip
    return Candidate("needless recompute", cost, 0.9 * cost, said(case, {"recompute": "none"}),
                     "Keep what there is room for.", rows, phase="backward")  # fmt: skip


def _memory(case: CauseCase) -> Candidate | None:
    """The update reads and writes each state once, whatever the batch: it is as fast as memory."""
    evidence = case.evidence
    cost = evidence.part("optim")
    if _small(case) > cost:  # so small a model's update is a few small operations more
        return None
    rows = [f"the optimiser's update, which memory bandwidth limits, takes {share(case, cost)}"]
    dp = evidence.size("dp")
    if dp > 1 and evidence.size("shard") == 1 and evidence.size("pp") == 1:
        change = said(case, {"dp": 1, "shard": dp, "zero": 1})
        return Candidate("memory bandwidth", cost, cost * (1 - 1 / dp), change, "Each rank updates its part.", rows,
                         phase="optim", priced=True)  # fmt: skip
    batch = evidence.setting("train", "global_batch")
    change = f"--train.global_batch {2 * batch}" if isinstance(batch, int) else ""
    return Candidate("memory bandwidth", cost, cost / 2, change, "More samples an update; the gain is of as many.",
                     rows, phase="optim")  # fmt: skip


def _cores(case: CauseCase) -> Candidate | None:
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
        [f"ranks are ready and wait for a core {share(case, cost)}: {evidence.cores} cores for {ranks} ranks{others}"],
    )  # fmt: skip


ON_RANKS: tuple[Callable[[CauseCase], Candidate | None], ...] = (
    _input, _python, _tiny, _saves, _validations, _between, _collector, _faults, _recompute, _memory, _cores,
)  # fmt: skip

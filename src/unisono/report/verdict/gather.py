"""The figures of a verdict out of a run's record."""

from collections.abc import Sequence

from unisono.observe.span import PARTS
from unisono.report.calls import StepCalls, steps
from unisono.report.collect import RankFacts, Record, RunRecord
from unisono.report.stragglers import stragglers
from unisono.report.verdict import traced
from unisono.report.verdict.evidence import (
    BESIDE,
    KernelsSeen,
    RankSeen,
    RunEvidence,
    StepSeen,
    number_of,
    steady,
)
from unisono.spec.words import is_number


def gather(
    run: RunRecord, window: tuple[int, int] | None = None, met: Sequence[StepCalls] | None = None
) -> RunEvidence:
    """What a run's record says of its steady steps, or of those from window[0] to window[1]. met: its steps with their
    calls, where they have been read already."""
    seen = run.ranks or (RankFacts(0, steps=tuple(r for r in run.steps if isinstance(r.get("time"), dict))),)
    common = set.intersection(*({line["step"] for line in facts.steps} for facts in seen))
    wanted = (
        steady(sorted(common))
        if window is None
        else [s for s in sorted(common) if window[0] <= s <= window[1]]
    )
    kept = frozenset(wanted)
    ranks = tuple(
        RankSeen(
            facts.rank,
            tuple(_seen(line) for line in facts.steps if line["step"] in kept),
            facts.coords,
            facts.host,
        )
        for facts in seen
    )
    met = [step for step in (steps(run.ranks) if met is None else met) if step.step in kept]
    environment = run.environment
    several = len({rank.host for rank in ranks}) > 1
    cores = environment.get("cores_usable") or environment.get("cores")
    world = run.summary.get("ranks")
    return RunEvidence(
        ranks,
        plan={key: value for key, _, value in (word.partition("=") for word in run.plan.split())},
        recipe=run.config,
        cores=cores if isinstance(cores, int) and not several else 0,
        memory_mib=1024.0 * number_of(environment, "memory_gib"),
        peak_mib=max(
            (line["mem_mib"] for f in seen for line in f.steps if is_number(line.get("mem_mib"))), default=0.0
        ),
        whole=not isinstance(world, int) or world == len(seen),
        calls=traced.calls(run, met),
        kernels=tuple(_kernels(line) for f in seen for line in f.steps if _looked(line)),
        late=tuple(stragglers(met)),
        bubble=traced.bubble(run),
        spread=traced.spread(run),
        error=str(run.error.get("what", "no reason was written down")) if run.error else "",
    )


def _seen(line: Record) -> StepSeen:
    time, modules = line["time"], line.get("modules")
    timed: dict[str, float] = {}
    for name, pair in modules.items() if isinstance(modules, dict) else ():
        if isinstance(pair, list) and all(is_number(value) for value in pair):
            timed[str(name)] = float(sum(pair))
    return StepSeen(
        line["step"],
        {part: float(time[part]) for part in PARTS if is_number(time.get(part))} | _between(line),
        {key: float(line[key]) for key in BESIDE if is_number(line.get(key))},
        number_of(line, "start") or None,
        timed,
    )


def _between(line: Record) -> dict[str, float]:
    known = number_of(line, "save_s") + number_of(line, "eval_s")
    return {"between": max(0.0, number_of(line, "between_s") - known)}


_KERNELS = ("count", "inside_s", "small_s", "small_count")


def _looked(line: Record) -> bool:
    kernels = line.get("kernels")
    return isinstance(kernels, dict) and all(is_number(kernels.get(key)) for key in _KERNELS)


def _gap(gap: object) -> str:
    """Between which operations, without torch's own first names."""
    names = (
        [str(name).rpartition("::")[2].removeprefix("evaluate_function: ") for name in gap[:2]]
        if isinstance(gap, list)
        else []
    )
    return f"between {names[0]} and {names[1]}" if len(names) == 2 and names[0] else ""


def _kernels(line: Record) -> KernelsSeen:
    """What a rank saw in one step. Python is at work while the thread has a core, is in no operation, collects no
    garbage and waits for nobody: with all that it is longer, as the step is, by the time in which it had no core."""
    looked, step = line["kernels"], _seen(line)
    count, inside, small, small_count = (looked[key] for key in _KERNELS)
    cpu = min(step.beside.get("cpu_s", step.busy), step.wall)
    paging = step.paging - step.blocked if step.paging else 0.0
    python = cpu - inside - step.beside.get("gc_s", 0.0) - paging
    python = max(0.0, min(python, number_of(looked, "outside_s")))
    return KernelsSeen(
        int(count), inside / step.cored, python / step.cored, small / step.cored, int(small_count),
        _gap(looked.get("gap")),
    )  # fmt: skip

"""The verdict by made-up figures: each cause alone is named, with what it costs and what to change; what cannot be told
apart is not."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.report.stragglers import NOBODY, Straggler
from unisono.report.verdict.evidence import (
    BubbleSeen,
    CallsSeen,
    KernelsSeen,
    RankSeen,
    RunEvidence,
    StepSeen,
)
from unisono.report.verdict.judge import UNKNOWN, as_json, in_words, judge

PARTS = {
    "data": 0.001,
    "forward": 0.03,
    "backward": 0.06,
    "comm_exposed": 0.002,
    "optim": 0.002,
    "other": 0.0,
}
HOST = {"cpu_s": 0.094, "queue_s": 0.0, "gc_s": 0.0, "faults": 0.0}
PLAN = {"dp": "2", "micros": "1"}
RECIPE = {
    "train": {"global_batch": 16, "micro_batch": 8, "save_every": 0},
    "data": {},
    "callbacks": {"call": []},
}


def evidence(ranks: int = 2, steps: int = 30, jitter: float = 0.01, **fields: Any) -> RunEvidence:
    """A healthy run; `parts` and `host` are those of all ranks, `rank0` changes rank 0's parts."""
    luck = random.Random(3)
    parts, host, rank0 = (fields.pop(name, {}) for name in ("parts", "host", "rank0"))
    seen = []
    for rank in range(ranks):
        times = {**PARTS, **parts, **(rank0 if rank == 0 else {})}
        seen.append(
            RankSeen(
                rank,
                tuple(
                    StepSeen(
                        step,
                        {k: v * luck.uniform(1 - jitter, 1 + jitter) for k, v in times.items()},
                        {**HOST, **host},
                    )
                    for step in range(1, steps + 1)
                ),
                {"dp": rank},
            )
        )
    return RunEvidence(
        tuple(seen),
        **{"plan": PLAN, "recipe": RECIPE, "cores": 8, "memory_mib": 16000.0, "peak_mib": 500.0, **fields},
    )


def late(rank: int, cost: float, phase: str = "backward", module: str = "blocks.2.mlp") -> Straggler:
    return Straggler(rank, phase, module, 5, cost, cost / 0.3, rank == NOBODY, 30, 26)


TROUBLES: dict[str, tuple[RunEvidence, str, str]] = {
    "input": (evidence(parts={"data": 0.2}), "input", ""),
    "thin link": (
        evidence(parts={"comm_exposed": 0.2}, cores=0, calls=(CallsSeen("dp", "all_reduce", 2, 4e6, 0.2),)),
        "communication", '--plan "dp=2 micros=1 codec=int8+ef"',
    ),
    "small buckets": (
        evidence(parts={"comm_exposed": 0.2}, cores=0, calls=(CallsSeen("dp", "all_reduce", 60, 2e6, 0.2),)),
        "small buckets", '--plan "dp=2 micros=1 sync=every_step:bucket=25"',
    ),
    "uneven stages": (
        evidence(parts={"wait": 0.1}, plan={"pp": "2", "micros": "8"}, bubble=BubbleSeen(0.45, 0.42, 0.11, (0.02, 0.06), 0.06)),
        "uneven stages", '--plan "pp=2 micros=8 schedule=1f1b:cut=measured"',
    ),
    "too few micro-batches": (
        evidence(parts={"wait": 0.1}, plan={"pp": "2", "micros": "2"}, bubble=BubbleSeen(0.35, 0.33, 0.33, (0.02, 0.02), 0.2)),
        "pipeline bubble", '--plan "pp=2 micros=4" --train.micro_batch 4',
    ),
    "slow rank": (evidence(late=(late(1, 0.15),), parts={"comm_exposed": 0.15}, rank0={"comm_exposed": 0.001}), "straggler", ""),
    "slow callback": (
        evidence(late=(late(0, 0.15, "", ""),), parts={"comm_exposed": 0.15}, rank0={"comm_exposed": 0.001, "between": 0.15},
                 recipe={**RECIPE, "callbacks": {"call": ["mine.py:tell"]}}),
        "python", "--callbacks.call []",
    ),
    "python in the loop": (
        evidence(parts={"forward": 0.2}, kernels=(KernelsSeen(100, 0.06, 0.17, 0.0, 0, "between item and mul"),)), "python", "",
    ),
    "tiny kernels": (
        evidence(kernels=(KernelsSeen(3000, 0.07, 0.02, 0.06, 2900),)), "tiny kernels",
        "--train.global_batch 64 --train.micro_batch 32",
    ),
    "too many micro-batches": (
        evidence(plan={"dp": "2", "micros": "32"}, recipe={"train": {"global_batch": 64, "micro_batch": 1}},
                 kernels=(KernelsSeen(3000, 0.07, 0.02, 0.06, 2900),)),
        "too many micro-batches", '--plan "dp=2 micros=4" --train.micro_batch 8',
    ),
    "checkpoints": (
        evidence(host={"save_s": 0.1}, recipe={"train": {"save_every": 1}}), "checkpoints", "--train.save_every 53",
    ),
    "validation": (
        evidence(host={"eval_s": 0.1}, recipe={"train": {"eval_every": 5}}), "validation", "--train.eval_every 20",
    ),
    "garbage collection": (evidence(parts={"forward": 0.1}, host={"gc_s": 0.07}), "garbage collection", ""),
    "swap": (
        evidence(parts={"forward": 0.2}, host={"faults": 900.0, "cpu_s": 0.1}), "host memory", "",
    ),
    "recompute": (
        evidence(plan={"dp": "2", "recompute": "full"}), "needless recompute", '--plan "dp=2 recompute=none"',
    ),
    "optimiser": (
        evidence(parts={"optim": 0.1}), "memory bandwidth", '--plan "dp=1 micros=1 shard=2 zero=1"',
    ),
    "cores": (evidence(host={"queue_s": 0.05}, cores=2), "cores", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_a_cause_alone_is_named_with_its_change(name: str) -> None:
    figures, cause, change = TROUBLES[name]
    verdict = judge(figures)
    assert (verdict.cause, verdict.sure, verdict.change) == (cause, True, change)
    assert 0.1 < verdict.share < 1 and 0 <= verdict.gain_s <= verdict.cost_s
    assert verdict.evidence and in_words(verdict).startswith("Limited by ")
    assert as_json(verdict)["trouble"] is (cause not in ("cores", "memory bandwidth"))


def test_a_healthy_run_has_no_trouble() -> None:
    verdict = judge(evidence())
    assert (verdict.cause, verdict.trouble, verdict.sure) == ("compute", False, True)


def test_who_is_late_is_named_with_phase_module_and_steps() -> None:
    verdict = judge(TROUBLES["slow rank"][0])
    assert (verdict.rank, verdict.phase, verdict.module) == (1, "backward", "blocks.2.mlp")
    assert (verdict.since_step, verdict.until_step) == (5, 30)
    assert verdict.cost_s == pytest.approx(0.15 * 26 / 30)


def test_ranks_that_take_turns_to_be_late_are_not_blamed() -> None:
    verdict = judge(
        evidence(late=(late(NOBODY, 0.1),), parts={"comm_exposed": 0.1}, cores=8, host={"queue_s": 0.2})
    )
    assert verdict.rank is None
    assert verdict.cause in ("rotating stragglers", "cores") and not (verdict.trouble and verdict.sure)


@pytest.mark.parametrize(("exposed", "cause"), [(0.016, "compute"), (0.03, "communication")])
def test_a_cause_that_no_change_makes_a_tenth_shorter_is_no_trouble(exposed: float, cause: str) -> None:
    """Of a step, 15 and 24 per cent are exposed on `shard`, and half of that would be saved."""
    verdict = judge(evidence(parts={"comm_exposed": exposed}, plan={"shard": "2"}, spread={"shard": 1.0}))
    assert (verdict.cause, verdict.trouble) == (cause, cause != "compute")
    assert "communication" in (verdict.cause, *(each["cause"] for each in verdict.others))


def test_a_rank_that_had_no_core_is_excused() -> None:
    figures = TROUBLES["slow rank"][0]
    waits = [replace(step, beside={**step.beside, "queue_s": 0.2}) for step in figures.ranks[1].steps]
    busy = replace(figures, ranks=(figures.ranks[0], replace(figures.ranks[1], steps=tuple(waits))))
    assert judge(busy).cause != "straggler"


def test_a_few_steps_are_not_judged() -> None:
    verdict = judge(evidence(steps=5, parts={"data": 0.2}))
    assert (verdict.cause, verdict.sure) == (UNKNOWN, False) and "--train.steps" in verdict.measure


def test_two_causes_that_cost_alike_are_not_told_apart() -> None:
    verdict = judge(evidence(parts={"data": 0.1, "forward": 0.12}, host={"gc_s": 0.09}))
    assert verdict.cause == UNKNOWN and verdict.measure
    assert {each["cause"] for each in verdict.others} >= {"input", "garbage collection"}


def test_nobody_is_blamed_where_a_ranks_events_are_missing() -> None:
    verdict = judge(evidence(ranks=1, whole=False, cores=0, parts={"comm_exposed": 0.2}))
    assert verdict.cause == UNKNOWN and "missing" in verdict.sentence


def test_what_is_smaller_than_the_noise_is_not_named() -> None:
    figures = evidence(steps=12)
    steps = tuple(
        replace(s, parts={**s.parts, "data": 2.0 if s.step % 12 == 7 else 0.0})
        for s in figures.ranks[0].steps
    )
    verdict = judge(replace(figures, ranks=tuple(replace(rank, steps=steps) for rank in figures.ranks)))
    assert verdict.cause == UNKNOWN and "known to ±" in verdict.sentence


def test_a_bubble_without_a_traced_step_says_what_to_measure() -> None:
    verdict = judge(evidence(parts={"wait": 0.1}, plan={"pp": "2", "micros": "8"}))
    assert verdict.cause == "pipeline bubble" and not verdict.sure and "trace_steps" in verdict.measure


def test_a_machine_busy_with_other_programs_hides_no_cause() -> None:
    verdict = judge(evidence(parts={"data": 0.2, "forward": 0.1}, host={"queue_s": 0.18}))
    assert (verdict.cause, verdict.sure) == ("input", True)


def test_the_planners_price_counts_where_it_knows_better() -> None:
    figures = TROUBLES["too few micro-batches"][0]
    verdict = judge(figures, lambda change: 0.8)
    assert verdict.by == "the planner's price" and verdict.gain_s == pytest.approx(0.2 * verdict.step_s)
    assert judge(figures, lambda change: 1.1).by != "the planner's price"


def test_nothing_measured_says_so() -> None:
    assert judge(RunEvidence(())).sentence.startswith("Nothing was measured")
    assert "out of memory" in judge(evidence(error="out of memory")).sentence


@given(
    st.dictionaries(st.sampled_from(sorted(PARTS)), st.floats(0, 1), min_size=1),
    st.dictionaries(st.sampled_from(sorted(HOST)), st.floats(0, 1)),
)
def test_whatever_the_figures_the_verdict_stays_within_a_step(
    parts: dict[str, float], host: dict[str, float]
) -> None:
    verdict = judge(evidence(steps=9, parts=parts, host=host))
    assert verdict.cost_s >= 0 and verdict.gain_s <= verdict.cost_s + 1e-9
    assert verdict.sure <= (verdict.covers >= 0.6)

"""recompute=auto: each stage computes again what it must, and nothing that fits is quicker."""

import json
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from tests.planner.published import gpt
from unisono.cli import main
from unisono.models.convnet.resnet import resnet
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import Again, of_row
from unisono.planner.played import span
from unisono.planner.price import rows
from unisono.planner.recompute import Extra, fewest
from unisono.planner.simulate import Answer, Question, simulate
from unisono.planner.stack import stack
from unisono.planner.work.networks import Network

MODEL, MADE = gpt(32, 32, 4096, 2048), stack("megatron-2022")
FUSED = replace(MADE, fused_attention=True)


def with_memory(gib: float) -> Cluster:
    where = cluster("dgx-a100:8")
    return replace(where, device=replace(where.device, memory=gib * 2.0**30))


def answer(
    text: str, gib: float = 80.0, micro_batch: int = 2, made: object = MADE, model: object = MODEL
) -> Answer:
    plan = Plan.parse(f"precision=bf16 {text}")
    return simulate(Question(model, plan, with_memory(gib), made, micro_batch, 8))  # type: ignore[arg-type]


def short(missing: float, live: Extra, some: float, full: float) -> float:
    """Bytes to be saved, with what is there while it is computed again."""
    return missing + (live.full if full else live.selective if some else 0.0)


def brute(layers: int, missing: float, saved: Extra, live: Extra, extra: Extra) -> float | None:
    """Seconds of the cheapest counts that save enough; None where none do."""
    each = [
        full * extra.full + some * extra.selective
        for full, some in product(range(layers + 1), repeat=2)
        if full + some <= layers
        and full * saved.full + some * saved.selective >= short(missing, live, some, full)
    ]
    return min(each, default=None)


def test_no_counts_are_cheaper_than_those_that_are_chosen() -> None:
    dice, fit, unfit = Random(3), 0, 0
    for _ in range(600):
        layers = dice.randint(1, 9)
        partly = dice.choice((0.0, dice.uniform(0.1, 5.0)))
        saved = Extra(partly, partly + dice.uniform(0.1, 5.0))
        extra = Extra(dice.uniform(0.0, 2.0), dice.uniform(0.0, 2.0))
        scores, missing = partly * dice.choice((0.0, 1.0, dice.uniform(0.0, 1.0))), dice.uniform(-3.0, 50.0)
        live = Extra(scores, scores + dice.choice((0.0, dice.uniform(0.0, 4.0))))
        got = fewest(layers, missing, saved, live, extra)
        best = brute(layers, missing, saved, live, extra)
        assert got.full + got.selective <= layers
        assert got.full == int(got.full) and got.selective == int(got.selective)
        if missing <= 0:
            assert got == Again(0.0, 0.0)
        elif best is not None:
            enough = got.full * saved.full + got.selective * saved.selective
            assert enough >= short(missing, live, got.selective, got.full) * (1 - 1e-9)
            seconds = got.full * extra.full + got.selective * extra.selective
            assert seconds == pytest.approx(best, abs=1e-9)
            fit += 1
        else:
            unfit += 1
    assert fit > 150 and unfit > 100


def test_arrays_are_chosen_as_numbers_are() -> None:
    dice = np.random.default_rng(5)
    missing, held = dice.uniform(-5.0, 60.0, (6, 7)), dice.integers(1, 9, (6, 1)).astype(float)
    for partly, extra in ((0.7, Extra(0.03, 0.3)), (0.7, Extra(0.3, 0.31)), (0.0, Extra(0.0, 0.3))):
        live = Extra(0.3 * partly, 0.5)
        got = fewest(8.0, missing, Extra(partly * held, 1.1 * held), live, extra)  # type: ignore[arg-type]
        for at in np.ndindex(missing.shape):
            times = float(held[at[0], 0])
            one = fewest(8.0, float(missing[at]), Extra(partly * times, 1.1 * times), live, extra)
            assert (np.asarray(got.selective)[at], np.asarray(got.full)[at]) == (one.selective, one.full)


PLANS = (
    "shard=2 tp=8 zero=1", "pp=8 tp=4", "pp=4 tp=4 dp=2", "pp=4 tp=4 schedule=gpipe", "tp=8 pp=2 schedule=zb1p",
    "pp=4 tp=4 schedule=interleaved:v=2", "shard=16 tp=4", "pp=8 tp=4 offload=activations", "pp=4 tp=4 offload=params",
    "pp=4 tp=4 schedule=zbv", "tp=4 pp=4 schedule=dualpipe",
)  # fmt: skip


@pytest.mark.parametrize("made", [MADE, FUSED], ids=["scores", "fused"])
@pytest.mark.parametrize("text", PLANS)
def test_auto_is_the_quickest_of_what_fits(text: str, made: object) -> None:
    for gib in (10, 16, 24, 40):
        fixed = [answer(f"{text} recompute={mode}", gib, made=made) for mode in ("none", "selective", "full")]
        auto = answer(f"{text} recompute=auto", gib, made=made)
        assert auto.verdict.fits == any(one.verdict.fits for one in fixed)
        for one in fixed:
            if one.verdict.fits:
                assert auto.price.step <= one.price.step * (1 + 1e-9)
        if auto.verdict.fits:
            assert auto.verdict.memory.total <= auto.verdict.capacity
        if fixed[0].verdict.fits and "activations" not in text:
            assert auto.price.step == pytest.approx(fixed[0].price.step)
            assert auto.verdict == fixed[0].verdict and auto.price.recompute == 0.0
        parts = sum(stage.blocks for stage in auto.stages)
        assert parts == 32 and len(auto.stages) == auto.question.plan.pp


@pytest.mark.parametrize("text", PLANS[:6])
def test_more_memory_is_never_slower_and_never_more_is_computed_again(text: str) -> None:
    before: Answer | None = None
    partial = 0
    for gib in np.arange(8.0, 60.0, 1.5):
        now = answer(f"{text} recompute=auto", float(gib), made=FUSED)
        if not now.verdict.fits:
            assert before is None
            continue
        if before is not None:
            assert now.price.step <= before.price.step * (1 + 1e-12)
            for one, then in zip(now.stages, before.stages, strict=True):
                assert one.full <= then.full and one.selective == then.selective == 0
        partial += any(0 < stage.full < stage.blocks for stage in now.stages)
        before = now
    assert partial > 0


def test_no_other_counts_are_quicker_on_the_whole_pipeline() -> None:
    """Every pair of counts on two stages of three blocks, played."""
    model, plan = gpt(6, 32, 4096, 2048), Plan.parse("precision=bf16 pp=2 recompute=auto")
    seen = set[tuple[float, float]]()
    for gib in (20.0, 22.0, 23.0, 24.0, 26.0, 28.0):
        where = with_memory(gib)
        got = simulate(Question(model, plan, where, MADE, 2, 8))
        if not got.verdict.fits:
            continue
        ways = [Again(s, f) for s, f in product(range(4), repeat=2) if s + f <= 3]
        fitting = [
            [
                way
                for way in ways
                if of_row(model, plan, MADE, micro_batch=2, micros=8, row=row, again=way).total
                <= where.device.memory - where.device.reserved
            ]
            for row in range(2)
        ]
        spans = [span("1f1b", 6, 8, rows(model, plan, where, MADE, 2, pair)) for pair in product(*fitting)]
        own = span("1f1b", 6, 8, rows(model, plan, where, MADE, 2, got.price.again))
        assert own is not None and own <= min(one for one in spans if one is not None) * (1 + 1e-12)
        seen |= {(one.selective, one.full) for one in got.price.again}
    assert len(seen) >= 3


def test_the_first_stages_hold_more_and_compute_more_again() -> None:
    got = answer("pp=8 tp=4 recompute=auto", 7.6, made=FUSED)
    counts = [stage.full for stage in got.stages]
    assert counts[0] > 0 and counts == sorted(counts, reverse=True) and counts[-1] < counts[0]


GPT3 = (
    "--model.kind gpt --model.n_layer 96 --model.n_head 96 --model.d_model 12288 --model.context 2048"
    " --model.vocab 51200 --model.dropout 0.1 --train.global_batch 1536 --train.micro_batch 1 --cluster dgx-a100:128"
).split()


def test_it_is_said_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", *GPT3, "--plan", "dp=16 tp=8 pp=8 precision=bf16 recompute=auto"]
    assert main(asked) == 0
    page = capsys.readouterr().out
    assert "8 stages, 12 blocks each" in page and "computed a second time" in page
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    line = next(line for line in page.splitlines() if line.startswith("recompute"))
    first = told["stages"][0]
    assert 0 < first["recompute"]["selective"] < first["blocks"] == 12
    assert f"in {first['recompute']['selective']:g} of 12 blocks of stage 0; none in the others" in line
    assert all(one["recompute"] == {"selective": 0, "full": 0} for one in told["stages"][1:])
    assert sum(part["seconds"] for part in told["waterfall"]) == pytest.approx(told["step_s"])


def test_a_plan_that_is_too_large_is_offered_just_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *GPT3, "--plan", "shard=16 zero=3 tp=8 pp=8 schedule=gpipe precision=bf16"]) == 5
    assert "recompute=auto" in capsys.readouterr().err


def test_networks_of_parts_are_recomputed_whole_or_not() -> None:
    network, where = Network(resnet("50")), cluster("dgx-a100")
    seen = set[str]()
    for size in (64, 512, 1024, 2048, 3072, 4096):
        got = {
            mode: simulate(
                Question(network, Plan.parse(f"dp=8 precision=bf16 recompute={mode}"), where, MADE, size, 1)
            )
            for mode in ("none", "full", "auto")
        }
        same = "none" if got["none"].verdict.fits else "full"
        assert got["auto"].price.step == got[same].price.step
        assert got["auto"].verdict == got[same].verdict
        assert {stage.full > 0 for stage in got["auto"].stages} == {same == "full"}
        seen.add(same)
    assert seen == {"none", "full"}

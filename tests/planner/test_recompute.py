"""recompute=auto: as few blocks computed again as fit, row by row."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.stack import stack
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import ConfigProblems, UsageError

MADE = stack("megatron-2022")


def answer(text: str, gib: float, fused: bool) -> PlanResult:
    where = cluster("dgx-a100:8")
    where = replace(where, device=replace(where.device, memory=gib * 2.0**30))
    plan, made = Plan.parse(f"precision=bf16 {text}"), replace(MADE, fused_attention=fused)
    return simulate(PlanRequest(gpt(32, 32, 4096, 2048), plan, where, made, 2, 8))


def between(text: str, part: float, fused: bool) -> float:
    """GiB of a device on which every block computed again just fits, 0, or none does, 1, or what lies between."""
    low, high = (answer(f"{text} recompute={mode}", 80, fused).verdict for mode in ("full", "none"))
    beside = 80 * 2.0**30 - low.capacity + 1e6
    return (beside + low.memory.allocated + part * (high.memory.allocated - low.memory.allocated)) / 2.0**30


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "text",
    ["shard=2 tp=8 zero=1", "pp=8 tp=4", "pp=4 tp=4 dp=2 schedule=interleaved:v=2", "pp=4 tp=4 schedule=zbv"],
)
def test_auto_fits_where_anything_does_and_is_no_slower_than_a_mode_for_all_blocks(
    text: str, fused: bool
) -> None:
    taken = set[str]()
    for part in (-0.1, 0.0, 0.2, 0.4, 0.6, 0.8, 1.01):
        gib = between(text, part, fused)
        ways = [answer(f"{text} recompute={mode}", gib, fused) for mode in ("none", "selective", "full")]
        auto = answer(f"{text} recompute=auto", gib, fused)
        fitting = [one.price.step for one in ways if one.verdict.fits]
        assert auto.verdict.fits == bool(fitting)
        if fitting:
            assert auto.price.step <= min(fitting) * (1 + 1e-9)
        else:
            assert auto.played.recompute == "full"
        taken.add(auto.played.recompute)
    assert len(taken) > 3


@pytest.mark.parametrize("text", ["pp=8 tp=4", "pp=4 tp=4 dp=2 schedule=interleaved:v=2"])
@pytest.mark.parametrize("part", [0.4, 0.7])
def test_no_row_computes_a_block_again_without_need(text: str, part: float) -> None:
    gib = between(text, part, True)
    plan = answer(f"{text} recompute=auto", gib, True).played
    counts = [int(n) for n in plan.recompute.partition("full=")[2].partition(",")[0].split("/")]
    assert len({*counts}) > 1
    for stage, count in enumerate(counts):
        if not count:
            continue
        fewer = "/".join(str(n - (at == stage)) for at, n in enumerate(counts))
        assert not answer(f"{text} recompute=auto:full={fewer},selective=0", gib, True).verdict.fits


def test_llama_3_of_405b_is_priced_as_it_was_measured() -> None:
    """8,192 H100, tp=8, pp=16, the optimiser dealt over 64 ranks, 8,192 positions, 16 M tokens a step: 430 TFLOP/s a
    device (Grattafiori et al., 2024, table 4)."""
    model = Transformer(
        126, 128, 16384, 8192, 128256, 8, 53248, noisy=False, bias=False, gated=True, rms=True, learned=False,
        tied=False,
    )  # fmt: skip
    own = "/".join(
        map(str, (0, *[1] * 126, 0))
    )  # a block on each of 128 stages, none on the first and the last
    for v, where in (("4", "dgx-h100:1024"), ("4", "h100-roce:1024"), (f"8,cut={own}", "dgx-h100:1024")):
        text = f"shard=64 zero=1 tp=8 pp=16 schedule=interleaved:v={v} recompute=auto precision=bf16"
        got = simulate(PlanRequest(model, Plan.parse(text), cluster(where), stack("megatron-2024"), 1, 32))
        assert got.verdict.fits and got.tflops == pytest.approx(430, rel=0.1)


def test_a_number_for_each_stage_is_asked_for_as_many_as_there_are() -> None:
    with pytest.raises(UsageError, match="says 3 stages, and the model is cut into 8"):
        answer("pp=8 tp=4 recompute=auto:full=1/2/3,selective=0", 80, True)
    with pytest.raises(ConfigProblems, match="one for each stage"):
        Plan(recompute="auto:full=1/x,selective=0")

"""What is priced is the cut that the run makes."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.config import ModelConfig
from unisono.models.build import Facts, build
from unisono.parallel.cut import cut
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.cuts import balanced, even, head_share, rows_of, shares
from unisono.planner.pricing import price
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.work.transformer import transformer
from unisono.programs.balance import balance

SCHEDULES = ("1f1b", "interleaved:v=2", "zbv", "dualpipe", "dualpipev")


@pytest.mark.parametrize("last", [0.0, 0.3, 1.0, 2.08, 5.5])
def test_the_balanced_cut_is_the_one_of_the_run(last: float) -> None:
    for blocks in (4, 6, 11, 24, 31):
        for stages in range(1, min(blocks, 9) + 1):
            theirs = tuple(len(part) for part in balance([1.0] * blocks, 0.0, last, stages))
            assert balanced(blocks, stages, last) == theirs, (blocks, stages)


@pytest.mark.parametrize("vocab", [256, 4000])
def test_a_built_model_is_cut_as_it_is_priced(vocab: int) -> None:
    config = ModelConfig(kind="gpt", n_layer=7, n_head=4, d_model=64, context=32)
    built = build(config, Facts(vocab=vocab))
    for stages in (1, 2, 3, 5):
        counts = tuple(len(part) for part in cut(built, stages))
        assert rows_of(transformer(config, vocab), "1f1b", stages, True) == counts


def test_all_blocks_are_dealt() -> None:
    model = gpt(24, 16, 2048, 2048)
    for ranks in (1, 2, 3, 4, 8, 12):
        assert sum(even(24, ranks)) == 24
        for schedule in SCHEDULES:
            for is_balanced in (False, True):
                assert sum(rows_of(model, schedule, ranks, is_balanced)) == 24


def test_the_dearest_row_of_a_balanced_cut_is_no_dearer() -> None:
    model = gpt(24, 16, 2048, 2048)
    last = head_share(model)
    assert last == pytest.approx(51200 / (12 * 2048))
    for ranks in (2, 4, 8):
        plain, better = rows_of(model, "1f1b", ranks, False), rows_of(model, "1f1b", ranks, True)
        assert max(*better[:-1], better[-1] + last) <= max(*plain[:-1], plain[-1] + last)
    with pytest.raises(ValueError, match="cannot make"):
        balanced(3, 4, 0.0)


def test_a_cut_of_several_stages_a_rank_has_its_price() -> None:
    """Each stage takes what its blocks take: an even cut costs what no cut does, and uneven stages wait for each other."""
    model, where = gpt(16, 16, 2048, 1024), cluster("dgx-a100:1")

    def step(words: str) -> float:
        plan = Plan.parse(f"pp=2 tp=4 micros=8 precision=bf16 schedule=interleaved:v=2{words}")
        return price(PlanRequest(model, plan, where, replace(stack("plain"), balanced=False), 1, 8)).step

    assert step(",cut=4/4/4/4") == pytest.approx(step(""), rel=1e-12)
    assert step(",cut=4/4/4/4") < step(",cut=7/1/1/7") and step(",cut=4/4/4/4") < step(",cut=7/1/7/1")
    assert rows_of(model, "interleaved:v=2,cut=3/5/5/3", 2, False) == (8, 8)
    assert shares("interleaved:v=2,cut=3/5/5/3", 2) == (3 / 8, 5 / 8, 5 / 8, 3 / 8)

"""Which batch: small ones waste hardware, large ones samples; the advice lies between, where the noise scale puts it."""

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.simulate import Question, simulate
from unisono.planner.stack import stack
from unisono.planner.studies import batches


def asked(plan: str = "dp=8 tp=2 pp=4") -> Question:
    where = cluster("dgx-a100:8")
    return Question(
        gpt(24, 16, 2048, 1024), Plan.parse(f"{plan} precision=bf16"), where, stack("megatron-2022"), 1, 8
    )


def test_hardware_likes_large_batches() -> None:
    got = batches.advise(asked())
    assert got is not None and got.noise is None and got.fastest is None
    assert [row.batch for row in got.rows] == [8 << n for n in range(len(got.rows))]
    for row in got.rows:
        assert row.batch == row.micro_batch * row.micros * 8
    shares = [row.hardware for row in got.rows]
    assert shares[0] < 0.5 and max(shares) == 1.0
    before = got.rows[got.rows.index(got.enough) - 1]
    assert before.hardware < 1 - batches.CLOSE <= got.enough.hardware


def test_each_row_is_the_fastest_split() -> None:
    ask = asked()
    got = batches.advise(ask)
    assert got is not None
    row = got.rows[4]
    share = row.batch // 8
    steps = []
    for size in (n for n in range(1, 17) if share % n == 0):
        plan = Plan.parse(f"{ask.plan} micros={share // size}")
        answer = simulate(Question(ask.model, plan, ask.cluster, ask.stack, size, share // size))
        steps.append(answer.price.step)
    assert row.step == pytest.approx(min(steps))


def test_time_to_the_same_loss_weighs_both() -> None:
    low, high = batches.advise(asked(), 64.0), batches.advise(asked(), 16_384.0)
    assert low is not None and high is not None and low.fastest is not None and high.fastest is not None
    assert low.fastest.batch < high.fastest.batch
    assert low.fastest.time == 1.0 and all(row.time is not None and row.time >= 1.0 for row in low.rows)
    for row in high.rows:
        assert row.samples == pytest.approx(1 + row.batch / 16_384.0)
    # Far below the noise scale twice the batch is half the steps; far above, none fewer (McCandlish et al., 2018).
    first, second = high.rows[:2]
    assert first.time is not None and second.time is not None
    assert (second.time / second.step) / (first.time / first.step) == pytest.approx(0.5, rel=0.01)
    nearly = [row.time / row.step for row in low.rows if row.time is not None]
    assert nearly[-1] == pytest.approx(nearly[-2], rel=0.01)


def test_what_does_not_fit_is_not_advised() -> None:
    big = Question(
        gpt(96, 96, 12288, 2048), Plan.parse("precision=bf16"), cluster("dgx-a100"), stack("plain"), 1, 1
    )
    assert batches.advise(big) is None and "none fits" in batches.told(None)[1]

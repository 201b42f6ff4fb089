"""Which batch: small ones waste hardware, large ones samples; the advice lies between, where the noise scale puts it."""

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono_contrib.planner.studies import batches


def asked(plan: str = "dp=8 tp=2 pp=4") -> PlanRequest:
    where = cluster("dgx-a100:8")
    return PlanRequest(
        gpt(24, 16, 2048, 1024), Plan.parse(f"{plan} precision=bf16"), where, stack("megatron-2022"), 1, 8
    )


def test_hardware_likes_large_batches() -> None:
    got = batches.advise(asked())
    assert [row["global_batch"] for row in got] == [8 << n for n in range(len(got))]
    for row in got:
        assert row["global_batch"] == row["micro_batch"] * row["micros"] * 8 and row["time"] is None
    shares = [row["hardware"] for row in got]
    assert shares[0] < 0.5 and max(shares) == 1.0
    told = batches.describe(asked())[0]["batches"]
    enough = next(n for n, row in enumerate(got) if row["global_batch"] == told["enough"])
    assert shares[enough - 1] < 1 - batches.CLOSE <= shares[enough]
    assert told["noise_scale"] is None and told["fastest"] is None


def test_each_row_is_the_fastest_split() -> None:
    ask = asked()
    row = batches.advise(ask)[4]
    share = row["global_batch"] // 8
    steps = []
    for size in (n for n in range(1, 17) if share % n == 0):
        plan = Plan.parse(f"{ask.plan} micros={share // size}")
        answer = simulate(PlanRequest(ask.model, plan, ask.cluster, ask.stack, size, share // size))
        steps.append(answer.price.step)
    assert row["step_s"] == pytest.approx(min(steps))


def test_time_to_the_same_loss_weighs_both() -> None:
    low, high = batches.advise(asked(), 64.0), batches.advise(asked(), 16_384.0)
    fastest = [batches.describe(asked(), noise)[0]["batches"]["fastest"] for noise in (64.0, 16_384.0)]
    assert fastest[0] < fastest[1]
    assert next(row["time"] for row in low if row["global_batch"] == fastest[0]) == 1.0
    assert all(row["time"] >= 1.0 for row in low)
    for row in high:
        assert row["samples"] == pytest.approx(1 + row["global_batch"] / 16_384.0)
    # Far below the noise scale twice the batch is half the steps; far above, none fewer (McCandlish et al., 2018).
    first, second = high[:2]
    assert (second["time"] / second["step_s"]) / (first["time"] / first["step_s"]) == pytest.approx(
        0.5, rel=0.01
    )
    nearly = [row["time"] / row["step_s"] for row in low]
    assert nearly[-1] == pytest.approx(nearly[-2], rel=0.01)


def test_what_does_not_fit_is_not_advised() -> None:
    big = PlanRequest(
        gpt(96, 96, 12288, 2048), Plan.parse("precision=bf16"), cluster("dgx-a100"), stack("plain"), 1, 1
    )
    assert batches.advise(big) == [] and "none fits" in batches.describe(big)[1]

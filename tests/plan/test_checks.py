"""A plan is held against its recipe: the batch adds up, the sizes divide, and every problem comes with a remedy."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config import LaunchConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Batch, Plan
from unisono.plan.checks import batch_of

few = st.integers(1, 16)


def codes(plan: str, recipe: Recipe) -> set[str]:
    problems = Plan.parse(plan).check(recipe)
    assert all(p.fix and p.where for p in problems)
    return {p.code for p in problems}


@pytest.mark.parametrize(
    ("cut", "wrong"),
    [
        ("interleaved:v=3,cut=0/1/1/1/1/0", set()),
        ("zbv:cut=0/2/1/1", set()),
        ("zbv:cut=0/2/2/0", {"P13"}),  # the first rank has both ends
        ("1f1b:cut=0/4", {"P13"}),
        ("interleaved:v=3,cut=0/1/1/1/2/0", {"P13"}),
    ],
)
def test_the_ends_may_have_no_blocks_where_their_rank_has_some(cut: str, wrong: set[str]) -> None:
    recipe = Recipe(model=ModelConfig(n_layer=4))
    assert codes(f"pp=2 micros=2 schedule={cut}", recipe) == wrong


@given(few, few, few, few, st.sampled_from(["global", "micro", "micros"]))
def test_any_two_numbers_of_the_batch_give_the_third(
    dp: int, shard: int, micro: int, micros: int, hidden: str
) -> None:
    total = micro * micros * dp * shard
    train = TrainConfig(
        **({} if hidden == "global" else {"global_batch": total}),
        **({} if hidden == "micro" else {"micro_batch": micro}),
    )
    plan = Plan(dp=dp, shard=shard, micros=None if hidden == "micros" else micros)
    assert batch_of(plan, train) == (Batch(total, micro, micros, dp * shard), None)


@given(few, few, few, st.none() | few, st.none() | few)
def test_a_batch_adds_up_or_says_why_not(
    total: int, dp: int, shard: int, micro: int | None, micros: int | None
) -> None:
    train = TrainConfig(global_batch=total, micro_batch=micro)
    batch, problem = batch_of(Plan(dp=dp, shard=shard, micros=micros), train)
    assert (batch is None) != (problem is None)
    if batch is not None:
        assert batch.global_batch == total == batch.micro_batch * batch.micros * batch.replicas
        assert micro in (None, batch.micro_batch)
        assert micros in (None, batch.micros)
    elif problem is not None:
        assert f"global_batch {total}" in problem.what
        assert f"replicas {dp * shard}" in problem.what


def test_one_micro_batch_where_nothing_is_said() -> None:
    batch, _ = batch_of(Plan(dp=2), TrainConfig(global_batch=32))
    assert batch == Batch(32, 16, 1, 2)


def test_the_sum_is_shown() -> None:
    (problem,) = Plan.parse("dp=2 micros=8").check(Recipe(train=TrainConfig(global_batch=64, micro_batch=8)))
    assert problem.what == "global_batch 64 is not micro_batch 8 x micros 8 x replicas 2 = 128"
    assert "micros=4" in problem.fix
    assert "--train.global_batch 128" in problem.fix


def test_each_rank_of_tp_has_something() -> None:
    """Any degree up to the smallest of what is dealt: heads, widths and positions need not be multiples of it."""
    gpt = Recipe(model=ModelConfig(n_head=6, d_model=96, n_kv_head=2, d_ff=250, context=66))
    assert codes("tp=4", gpt) == codes("tp=5", gpt) == codes("tp=2", gpt) == set()
    found = Plan.parse("tp=7").check(gpt)
    assert [p.where for p in found] == ["plan.tp, model.n_head"] and "tp=6 or less" in found[0].fix


def test_kinds_differ_in_what_they_split() -> None:
    assert "P12" in codes("tp=2", Recipe(model=ModelConfig(kind="dlrm")))
    assert codes("tp=8", Recipe(model=ModelConfig(kind="convnet"))) == set()
    assert "P12" in codes("tp=3", Recipe(model=ModelConfig(kind="convnet", channels=6)))
    assert codes("tp=2", Recipe(model=ModelConfig(kind="mlp", hidden=(64, 32)))) == set()
    assert "P12" in codes("tp=34", Recipe(model=ModelConfig(kind="mlp", hidden=(64, 33))))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_need_blocks(stages: int) -> None:
    recipe = Recipe(model=ModelConfig(n_layer=3))
    assert codes(f"pp={stages}", recipe) == ({"P13"} if stages > 3 else set())


def test_one_stages_timetable_is_for_one_stage() -> None:
    assert codes("schedule=accumulate", Recipe()) == set()
    assert codes("pp=2 schedule=accumulate", Recipe()) == {"P13"}


def test_ranks_must_be_the_plans() -> None:
    four = Recipe(launch=LaunchConfig(ranks=4))
    assert codes("dp=2 pp=2", four) == set()
    assert codes("dp=-1 pp=2", four) == {"P14"}  # until it is filled
    (problem,) = Plan.parse("dp=4 pp=2").check(four)
    assert "8 ranks" in problem.what
    assert "dp=2" in problem.fix


def test_a_cluster_must_have_the_devices() -> None:
    cluster = SimpleNamespace(devices=4)
    assert {p.code for p in Plan(dp=8).check(None, cluster)} == {"P14"}
    assert Plan(dp=4).check(None, cluster) == []


@pytest.mark.parametrize(
    ("precision", "dtype", "fits"),
    [
        ("fp32", "float32", True),
        ("bf16", "float32", True),
        ("fp64", "float64", True),
        ("fp64", "float32", False),
        ("fp32", "float64", False),
        ("bf16", "float64", False),
    ],
)
def test_precision_goes_with_dtype(precision: str, dtype: str, fits: bool) -> None:
    recipe = Recipe(train=TrainConfig.model_validate({"dtype": dtype}))
    assert codes(f"precision={precision}", recipe) == (set() if fits else {"P15"})


def test_all_problems_at_once() -> None:
    recipe = Recipe(launch=LaunchConfig(ranks=5), train=TrainConfig(global_batch=7))
    assert codes("dp=2 tp=5 pp=9 cp=2 precision=fp64", recipe) == {
        "P11",
        "P12",
        "P13",
        "P14",
        "P15",
    }

"""The covering set: every pair that any allowed plan has, and a new value joins by itself."""

from itertools import combinations

import pytest

from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan, grammar
from unisono.verify import cover
from unisono.verify.cover import candidates, covering, with_leaves

RECIPE = Recipe(
    model=ModelConfig(n_layer=4, n_head=4, d_model=16, context=8),
    train=TrainConfig(global_batch=8, micro_batch=1, dtype="float64"),
)


def pairs(plans: list[Plan]) -> set[tuple[tuple[str, object], ...]]:
    return set().union(*cover._rows(plans, 2).values())


def test_every_pair_is_there_and_every_plan_is_allowed():
    plans = covering(RECIPE)
    assert pairs(plans) == pairs(candidates(RECIPE))
    assert all(not plan.check(RECIPE) and plan.world <= 8 for plan in plans)
    assert len(plans) == len(set(map(str, plans))) >= 100


def test_pairs_alone_take_far_fewer_plans_than_there_are():
    few = covering(RECIPE, least=0)
    assert pairs(few) == pairs(candidates(RECIPE))
    assert len(few) < len(candidates(RECIPE)) / 5


def test_the_set_is_the_same_each_time():
    assert covering(RECIPE) == covering(RECIPE)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch):
    """Changes the grammar's words for one test."""

    def forget() -> None:
        for cached in (grammar.played, grammar.known, grammar.problem_of, grammar.value_problems):
            cached.cache_clear()

    def change(key: str, names: tuple[str, ...]) -> None:
        monkeypatch.setattr(grammar, "_WORDS", {**grammar._WORDS, key: names})
        forget()

    yield change
    monkeypatch.undo()
    forget()


def test_a_new_value_is_covered_without_being_told(words):
    words("recompute", ("none", "full", "selective"))
    chosen = covering(RECIPE)
    with_it = [plan for plan in chosen if plan.recompute == "selective"]
    assert {axis for plan in with_it for axis in ("dp", "tp", "pp", "shard") if getattr(plan, axis) > 1} == {
        "dp", "tp", "pp", "shard",
    }  # fmt: skip


def test_a_small_cluster_is_kept_to():
    assert max(plan.world for plan in covering(RECIPE, ranks=2)) == 2


def test_micro_batches_are_fixed_so_that_plans_share_a_reference():
    free = RECIPE.model_copy(update={"train": TrainConfig(global_batch=12)})
    assert with_leaves(free).train.micro_batch == 3
    assert with_leaves(RECIPE) is RECIPE


def test_pairs_counts_values_of_different_keys():
    one = cover._rows([Plan(dp=2)], 2)[Plan(dp=2)]
    assert all(a[0] != b[0] for a, b in one)
    assert len(one) == len(set(combinations({key for pair in one for key, _ in pair}, 2)))

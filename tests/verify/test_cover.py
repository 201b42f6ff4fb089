"""The covering set: every pair that any allowed plan has, and a new value joins by itself."""

from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from unisono.config import ModelConfig, Recipe, TrainConfig, load
from unisono.plan import Plan, grammar
from unisono_contrib.verify import cover
from unisono_contrib.verify.cover import candidates, covering

RECIPE = Recipe(
    model=ModelConfig(n_layer=4, n_head=4, d_model=16, context=8),
    train=TrainConfig(global_batch=8, micro_batch=1, dtype="float64"),
)
RANKS = 4  # of the quick tests; on up to eight a set takes seconds


@cache
def every(ranks: int = RANKS) -> list[Plan]:
    return candidates(RECIPE, ranks)


@cache
def chosen(ranks: int = RANKS) -> list[Plan]:
    return covering(RECIPE, ranks)


def pairs(plans: list[Plan]) -> set[tuple[tuple[str, object], ...]]:
    return set().union(*cover._rows(plans, 2).values())


@pytest.mark.parametrize("ranks", [RANKS, pytest.param(8, marks=pytest.mark.slow)])
def test_every_pair_is_there_and_every_plan_is_allowed(ranks: int):
    plans = chosen(ranks)
    assert pairs(plans) == pairs(every(ranks))
    assert all(not plan.check(RECIPE) and plan.world <= ranks for plan in plans)
    assert len(plans) == len(set(map(str, plans))) >= 100


def test_what_an_mpirun_would_have_to_start_is_not_there():
    names = {plan.collective for plan in every()}
    assert "mpi" not in names
    assert {"ring", "tree", "engine"} <= names


@pytest.mark.parametrize(("ranks", "share"), [(RANKS, 1 / 2), pytest.param(8, 1 / 4, marks=pytest.mark.slow)])
def test_pairs_alone_take_far_fewer_plans_than_there_are(ranks: int, share: float):
    few = covering(RECIPE, ranks, least=0)
    assert pairs(few) == pairs(every(ranks))
    assert len(few) < len(every(ranks)) * share


def test_the_set_is_the_same_each_time():
    assert covering(RECIPE, RANKS) == chosen()


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch):
    """Changes the grammar's words for one test."""

    def forget() -> None:
        for cached in (grammar.known, grammar.problem_of, grammar.value_problems):
            cached.cache_clear()

    def change(key: str, names: tuple[str, ...]) -> None:
        monkeypatch.setattr(grammar, "_WORDS", {**grammar._WORDS, key: names})
        forget()

    yield change
    monkeypatch.undo()
    forget()


def test_a_new_value_is_covered_without_being_told(words):
    words("recompute", ("none", "full", "other"))
    with_it = [plan for plan in covering(RECIPE, RANKS) if plan.recompute == "other"]
    assert {axis for plan in with_it for axis in ("dp", "tp", "pp", "shard") if getattr(plan, axis) > 1} == {
        "dp", "tp", "pp", "shard",
    }  # fmt: skip


def test_a_small_cluster_is_kept_to():
    assert max(plan.world for plan in covering(RECIPE, ranks=2)) == 2


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(4, {1, 2, 3, 4}), pytest.param(8, {1, 2, 3, 4, 8}, marks=pytest.mark.slow)]
)
def test_plans_have_few_sizes_of_micro_batches_so_that_they_share_references(ranks: int, degrees: set[int]):
    free = RECIPE.model_copy(update={"train": TrainConfig(global_batch=24)})
    plans = candidates(free, ranks)
    assert {plan.replicas * (plan.micros or 0) for plan in plans} == {8, 12}
    assert {plan.dp for plan in plans if plan.sync == "canonical"} == degrees
    assert all(plan.micros is None for plan in every())


@pytest.mark.slow
def test_every_axis_has_three_ranks_somewhere_where_the_recipe_has_room_for_them():
    recipe = load(Path(__file__).parents[2] / "examples/proof.toml").recipe
    plans = covering(recipe)
    found = {axis: {getattr(plan, axis) for plan in plans} for axis in ("dp", "shard", "pp", "tp", "cp")}
    assert all({1, 2, 3} <= degrees for degrees in found.values()), found


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_bf16_is_there_where_its_bound_shows_something(ranks: int):
    found = candidates(RECIPE.model_copy(update={"train": TrainConfig(global_batch=8, micro_batch=1)}), ranks)
    in_bf16 = [plan for plan in found if plan.precision == "bf16"]
    assert in_bf16 and all(plan.tp * plan.cp == 1 for plan in in_bf16)
    assert {plan.precision for plan in found if plan.tp > 1} == {"fp32"}


def test_pairs_counts_values_of_different_keys():
    one = cover._rows([Plan(dp=2)], 2)[Plan(dp=2)]
    assert all(a[0] != b[0] for a, b in one)
    assert len(one) == len(set(combinations({key for pair in one for key, _ in pair}, 2)))

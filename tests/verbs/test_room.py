"""What fits is chosen by the ledger, and a run that is out of memory is told what would."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.train.small import recipe as small
from unisono.config import Loaded, ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.plan.blocks import Again, again_of
from unisono.spec.errors import Infeasible, UsageError
from unisono.train.data.load import load
from unisono.verbs.train import rank, room
from unisono.verbs.train.order import TrainOrder

GPT = ModelConfig(n_layer=8, n_head=8, d_model=256, context=128, vocab=512, dropout=0.1)
RECIPE = Recipe(model=GPT, train=TrainConfig(global_batch=16))


def total(plan: Plan, recipe: Recipe = RECIPE) -> float:
    found = room.ledger(recipe, plan)
    assert found is not None
    return found[1].total


def one_less(plan: Plan, depth: int) -> Iterator[str]:
    """`recompute` with a step less of one stage: a whole block less, or its attention."""
    each = [again_of(plan, depth, stage) for stage in range(plan.pp)]
    for at, one in enumerate(each):
        if not one.full and not one.selective:
            continue
        less = Again(one.full - 1, one.selective + 1) if one.full else Again(0, one.selective - 1)
        said = [*each[:at], less, *each[at + 1 :]]
        full, selective = ("/".join(str(getattr(s, mode)) for s in said) for mode in ("full", "selective"))
        yield f"auto:full={full},selective={selective}"


@pytest.mark.parametrize("text", ["micros=1", "pp=2 micros=4", "dp=2 micros=1"])
def test_auto_computes_as_little_again_as_fits(text: str) -> None:
    plan = Plan.parse(f"{text} recompute=auto")
    none, full = (total(replace(plan, recompute=mode)) for mode in ("none", "full"))
    seen = set[str]()
    for step in range(12):
        capacity = (full + (none - full) * step / 11) * 1.0001 / room.SHARE
        got, said = room.settled(RECIPE, plan, capacity)
        assert total(got) <= room.SHARE * capacity
        assert f"of {GPT.n_layer} blocks" in said
        for fewer in one_less(got, GPT.n_layer // plan.pp):
            assert total(replace(plan, recompute=fewer)) > room.SHARE * capacity
        seen.add(got.recompute)
    assert "none" in seen and len(seen) > 3
    with pytest.raises(Infeasible, match="every block computed again"):
        room.settled(RECIPE, plan, 0.5 * full)


def test_where_nothing_limits_nothing_is_computed_again() -> None:
    got, said = room.settled(RECIPE, Plan.parse("recompute=auto micros=1"), 1e15)
    assert again_of(got, 8) == again_of(Plan(), 8)
    assert "none of 8 blocks" in said


@pytest.mark.parametrize("text", ["dp=1", "dp=2", "pp=2", "recompute=full", "recompute=auto"])
def test_the_largest_micro_batch_that_fits_is_found(text: str) -> None:
    loaded, sizes = Loaded(RECIPE, Plan.parse(text), {}), set[int]()
    for capacity in (1.2e8, 1.3e8, 1.5e8, 2e8, 3e8, 6e8, 1e12):
        try:
            found, said = room.with_largest_micro_batch(loaded, None, {}, capacity)
        except Infeasible as error:
            assert error.fix
            continue
        size = found.recipe.train.micro_batch
        assert size is not None and f"micro_batch {size}" in said
        sizes.add(size)
        got = resolve(found.recipe, found.plan).plan
        as_played = replace(got, recompute="full") if text == "recompute=auto" else got
        assert total(as_played, found.recipe) <= room.SHARE * capacity
        if size * 2 * got.replicas <= 16:
            more = found.recipe.model_copy(
                update={"train": RECIPE.train.model_copy(update={"micro_batch": 2 * size})}
            )
            half = replace(as_played, micros=16 // got.replicas // (2 * size))
            assert total(half, more) > room.SHARE * capacity
    assert len(sizes) > 1
    given = RECIPE.model_copy(update={"train": TrainConfig(global_batch=16, micro_batch=2)})
    with pytest.raises(UsageError):
        room.with_largest_micro_batch(Loaded(given, Plan(), {}), None, {}, 1e12)


@pytest.mark.parametrize(
    "error", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")]
)
def test_out_of_memory_is_told_with_the_ledger_and_a_plan_that_fits(error: BaseException) -> None:
    plan = Plan.parse("dp=2 micros=1")
    got = room.out_of_memory(error, RECIPE, plan, 1e9)
    assert (got.exit, got.code) == (5, "M01")
    assert "activations" in got.likely and "optimiser" in got.likely
    change = got.fix.partition(",")[0]
    changed = Plan.parse(
        " ".join(word for word in f"{change}".split() if "micro_batch" not in word) or "dp=2"
    )
    assert change and not Plan.parse(str(changed)).check(None)
    assert "fits by the ledger" in got.fix


def test_a_rank_without_memory_raises_that(
    threads: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is injected where the session plays."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(rank, "session", fails)
    told = small(tmp_path).model_copy(
        update={"out": Recipe().out.model_copy(update={"dir": str(tmp_path / "runs")})}
    )
    resolved = resolve(told, "recompute=auto", 1)
    order = TrainOrder(resolved.recipe, resolved.plan, "").as_json()
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    (told_of,) = threads(played, 1, group=False, order=order, corpus=corpus)
    assert "Tried to allocate" in told_of["what"] and "weights" in told_of["likely"] and told_of["try"]
    assert (told_of["code"], told_of["exit"]) == ("U-M01", 5)


def played(ctx: Any, order: Any, corpus: Any) -> dict[str, Any]:
    with pytest.raises(Infeasible) as caught:
        rank.main(ctx, order, corpus)
    return caught.value.as_dict()

"""What ranks hold together is the model: boxes tile every tensor once, with the values that one device begins with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks import World
from tests.train.small import recipe, started


def held(
    ctx: Any, told: Any, plan: str
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor, bool]]:
    run, _, _ = started(ctx, told, plan)
    return [
        (slot.name, slot.shape, slot.start, slot.master.detach().clone(), slot.counted(run.mesh.at))
        for slot in run.local.slots
    ]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dp=st.sampled_from((1, 2)),
    shard=st.sampled_from(("", "shard=2 zero=1", "shard=2 zero=3")),
    pp=st.sampled_from((1, 2)),
    tp=st.sampled_from((1, 2)),
)
def test_boxes_tile_the_model_once_a_replica(threads: World, tmp_path: Path, dp, shard, pp, tp):
    told = recipe(tmp_path)
    plan = f"dp={dp} pp={pp} tp={tp} {shard}"
    ranks = dp * pp * tp * (2 if shard else 1)
    (whole,) = threads(held, 1, group=False, told=told, plan="dp=1")
    values = {name: value for name, _, _, value, _ in whole}
    times = {name: torch.zeros(value.shape) for name, value in values.items()}
    for rank in threads(held, ranks, told=told, plan=plan):
        for name, shape, start, value, counted in rank:
            assert shape == tuple(values[name].shape)
            box = tuple(slice(a, a + n) for a, n in zip(start, value.shape, strict=True))
            assert torch.equal(values[name][box], value), name
            times[name][box] += counted
    for name, count in times.items():  # the second use of a tied weight is counted where the first one is
        assert bool((count == (0 if name == "head.out.weight" else dp)).all()), name


def test_the_order_of_the_axes_says_which_ranks_are_neighbours(threads: World, tmp_path: Path):
    """With pp innermost, ranks 0 and 1 are the stages of one replica; as usual, the replicas of one stage."""
    usual, turned = (recipe(tmp_path), recipe(tmp_path))
    turned = turned.model_copy(update={"launch": turned.launch.model_copy(update={"order": "pp,dp"})})
    names = [
        [{slot[0] for slot in rank} for rank in threads(held, 4, told=told, plan="dp=2 pp=2")]
        for told in (usual, turned)
    ]
    (a, b, c, d), (e, f, g, h) = names
    assert a == b != c == d and e == g != f == h
    assert {frozenset(one) for one in names[0]} == {frozenset(one) for one in names[1]}


def test_a_cut_that_the_plan_says_is_taken(threads: World, tmp_path: Path):
    told = recipe(tmp_path)
    model = told.model.model_copy(update={"n_layer": 3})
    told = told.model_copy(update={"model": model})
    for cut, first in (("1/2", {0}), ("2/1", {0, 1})):
        ranks = threads(held, 2, told=told, plan=f"pp=2 schedule=1f1b:cut={cut}")
        blocks = [
            {int(slot[0].split(".")[1]) for slot in rank if slot[0].startswith("blocks.")} for rank in ranks
        ]
        assert blocks == [first, {0, 1, 2} - first]


@pytest.mark.parametrize("plan", ["tp=2", "shard=2", "pp=2"])
def test_a_rank_holds_less_than_one_device(threads: World, tmp_path: Path, plan: str):
    told = recipe(tmp_path)
    (whole,) = threads(held, 1, group=False, told=told, plan="dp=1")
    total = sum(value.numel() for _, _, _, value, _ in whole)
    for rank in threads(held, 2, told=told, plan=plan):
        assert sum(value.numel() for _, _, _, value, _ in rank) < 0.8 * total

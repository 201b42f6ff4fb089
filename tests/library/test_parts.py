"""Single promises of the library way."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.library import scenes
from tests.ranks import World

pytestmark = pytest.mark.timeout(120)


def test_ranks_see_parts_of_the_same_batches(threads: World) -> None:
    """Together the parts of a batch are the batch, and a part weighs as many samples as it has."""
    ranks = threads(scenes.parts, 3, group=False, plan="dp=3")
    for name in ("loader", "shuffled", "dropped", "tensors", "dicts", "small"):
        for parts in zip(*(rank[name] for rank in ranks), strict=True):
            weighty = [(ids, ratio) for ids, ratio in parts if ratio]
            count = sum(len(ids) for ids, _ in weighty)
            assert [ratio for _, ratio in weighty] == [round(60 * 3 * len(ids) / count) for ids, _ in weighty]
            assert all(len(ids) == 1 for ids, ratio in parts if not ratio)
        everything = [i for rank in ranks for ids, ratio in rank[name] if ratio for i in ids]
        assert sorted(everything) == list(range(18 if name == "dropped" else 20))
    assert sum(sum(rank["stream"]) for rank in ranks) == 20
    assert next(i for i, _ in ranks[0]["loader"]) == [0, 1] and ranks[0]["shuffled"] != ranks[0]["loader"]


@pytest.mark.parametrize(("plan", "ranks"), [("dp=3", 3), ("shard=2", 2)])
def test_batch_norm_sees_the_global_batch(threads: World, plan: str, ranks: int) -> None:
    """The last batch has two samples: the third rank's borrowed one does not count."""
    (expected,) = threads(scenes.batch_norm, 1, group=False, plan=None)
    for got in threads(scenes.batch_norm, ranks, group=False, plan=plan):
        assert got["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        for name, values in expected["weights"].items():
            assert got["weights"][name] == pytest.approx(values, abs=1e-10), name


def test_noise_differs_inside_the_model_only(threads: World) -> None:
    one, other = threads(scenes.noise, 2, group=False)
    assert one["inside"] != other["inside"]
    assert one["outside"] == other["outside"]
    assert one["quiet"] == other["quiet"]


def test_means_norms_lines_and_notes(threads: World, tmp_path: Path) -> None:
    one, other = threads(scenes.helpers, 2, group=False, folder=str(tmp_path))
    assert one["own"] == [0.0, 1.0] and other["own"] == [2.0, 3.0, 4.0]
    assert one["means"] == other["means"] == pytest.approx([2.0, 1.0])
    assert one["weighed"] == pytest.approx((30 * 1.0 + 10 * 5.0) / 40)
    assert one["logged"] == other["logged"] and "loss 0.5" in one["said"] and not other["said"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, **one["logged"]}
    assert one["notes"] == [
        f"spare.{leaf} had no gradient in the last backward on any rank" for leaf in ("weight", "bias")
    ]
    assert one["norms"] == other["norms"] and one["norms"][0] == pytest.approx(one["norms"][1])


def test_held_gradients_travel_once(threads: World) -> None:
    one, other = threads(scenes.bytes_sent, 2, group=False)
    assert one["each"] == 2 * one["once"] == 2 * one["late"] > 0
    for name in ("each weights", "once weights", "late weights"):
        assert one[name] == other[name]


def test_gradients_of_two_models_meet_whichever_is_ready_first(world: World) -> None:
    one, other = world(scenes.two_models, 2, group=False)
    assert one == other
    assert one["grads"] == [[[1.5] * 3]] * 2 + [[[1.5] * 5], [[0.5] * 5]]
    assert len(one["asked"]) == 2


def test_weights_of_a_model_with_a_tied_weight_load_on_one_device(threads: World) -> None:
    one, other = threads(scenes.tied, 2, group=False)
    assert one == other and one["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_what_cannot_be_prepared_is_refused_on_all_ranks(threads: World) -> None:
    one, other = threads(scenes.refused, 2, group=False)
    assert one == other
    assert one == {
        "order": "J02",
        "strangers": "J02",
        "meta": "J02",
        "sparse": "J02",
        "clip before prepare": "J08",
        "data set": "J03",
        "split already": "J03",
        "not iterable": "J03",
        "no tensors": "J03",
        "other data": "J04",
        "twice": "J02",
        "late parameter": "J02",
    }


@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("shard=2", 2)])
def test_a_run_goes_on_bit_for_bit(threads: World, tmp_path: Path, plan: str, ranks: int) -> None:
    whole = threads(scenes.saved, ranks, group=False, folder=str(tmp_path / "a"), plan=plan, first=0, last=3)
    begun = threads(scenes.saved, ranks, group=False, folder=str(tmp_path / "b"), plan=plan, first=0, last=1)
    rest = threads(
        scenes.saved, ranks, group=False, folder=str(tmp_path / "b"), plan=plan, first=1, last=3, load=True
    )
    assert begun[0]["losses"] + rest[0]["losses"] == whole[0]["losses"]
    for key in ("weights", "step", "lr"):
        assert rest[0][key] == whole[0][key]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_a_run_goes_on_under_another_plan(threads: World, tmp_path: Path, optimizer: str) -> None:
    told: dict[str, Any] = {"group": False, "optimizer": optimizer}
    whole = threads(scenes.saved, 2, folder=str(tmp_path / "a"), plan="dp=2", first=0, last=2, **told)
    threads(scenes.saved, 2, folder=str(tmp_path / "b"), plan="shard=2", first=0, last=1, **told)
    rest = threads(
        scenes.saved, 1, folder=str(tmp_path / "b"), plan="dp=1", first=1, last=2, load=True, **told
    )
    assert rest[0]["losses"] == pytest.approx(whole[0]["losses"][4:], abs=1e-12)


def test_nothing_saved_yet(threads: World, tmp_path: Path) -> None:
    assert threads(scenes.nothing_saved, 2, group=False, folder=str(tmp_path)) == [{"state": None}] * 2


def test_batch_norm_of_one_value_is_refused_as_on_one_device() -> None:
    """Its variance would be of nothing, and what it remembers not a number."""
    import torch
    from torch import nn

    from unisono.comm.group import Group
    from unisono.library.current_batch import CurrentBatch
    from unisono.library.gather import join_batches
    from unisono.observe.span import Recorder

    norm, one = nn.BatchNorm1d(3), torch.randn(1, 3)
    with pytest.raises(ValueError, match="more than 1 value"):
        norm(one)
    join_batches(norm, Group("dp", [0], 0, None, Recorder(0)), CurrentBatch(0, 1, lambda *_: None))
    with pytest.raises(ValueError, match="more than one value"):
        norm(one)
    norm(torch.randn(2, 3))
    assert norm.running_var is not None and norm.running_var.isfinite().all()

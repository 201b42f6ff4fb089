"""Skip connections over stages, and tied weights in any two of them: whatever timetable plays, it is one device's run."""

from pathlib import Path

import pytest

from tests.train.test_stages import on_ranks, trained, whole
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig

MODELS = Path(__file__).with_name("skips.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be, that is the question. " * 20)
    return file


def recipe_of(text, model):
    return Recipe(
        seed=3,
        model=ModelConfig(kind=f"{MODELS}:{model}", context=5),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=8, global_batch=8, micro_batch=1, lr=1e-2, clip=0.5, dtype="float64"),
    )


@pytest.mark.parametrize("model", ["unet", "tied_inside", "tied_first"])
def test_every_flush_timetable_is_one_device_to_the_bit(text, model):
    recipe = recipe_of(text, model)
    wanted = whole(on_ranks(recipe, "dp=1", "accumulate", trained))
    for plan, schedule in [
        ("pp=2", "1f1b"), ("pp=4", "gpipe"), ("pp=4", "1f1b"), ("pp=2", "interleaved:v=2"), ("pp=4", "interleaved:v=2"),
        ("pp=2", "interleaved:v=4"), ("pp=4", "looped_bfs:v=2"), ("pp=4", "zb1p"), ("pp=2", "zb2p"), ("pp=2", "zbv"),
        ("pp=4", "zbv"), ("pp=4", "dualpipev"),
    ]:  # fmt: skip
        assert whole(on_ranks(recipe, plan, schedule, trained)) == wanted, (plan, schedule)


@pytest.mark.parametrize("model", ["unet", "tied_inside", "tied_first"])
@pytest.mark.parametrize("plan", ["pp=2", "pp=4"])
def test_two_copies_are_one_device_to_rounding_and_to_the_bit_in_canonical_mode(text, model, plan):
    recipe = recipe_of(text, model)
    (numbers, loss, _), (got, got_loss, _) = (
        whole(on_ranks(recipe, *how, trained)) for how in (("dp=1", "accumulate"), (plan, "dualpipe"))
    )
    assert sum(got, ()) == pytest.approx(sum(numbers, ()), rel=1e-13) and got_loss == pytest.approx(
        loss, rel=1e-13
    )
    canonical = f"{plan} sync=canonical"
    assert whole(on_ranks(recipe, canonical, "dualpipe", trained)) == whole(
        on_ranks(recipe, canonical, "1f1b", trained)
    )


@pytest.mark.parametrize(
    "plan", ["dp=2 pp=2", "dp=2 pp=2 sync=canonical", "shard=2 zero=2 pp=2", "pp=2 recompute=full"]
)
def test_beside_other_axes_too(text, plan):
    recipe = recipe_of(text, "tied_inside")
    wanted = whole(on_ranks(recipe, plan, "1f1b", trained))
    for schedule in ("interleaved:v=2", "zbv"):
        numbers, loss, _ = whole(on_ranks(recipe, plan, schedule, trained))
        # Uses of a tied weight that share a rank are added up before replicas meet, others after.
        assert loss == pytest.approx(wanted[1], rel=1e-13)
        assert sum(numbers, ()) == pytest.approx(sum(wanted[0], ()), rel=1e-12)

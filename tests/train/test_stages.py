"""Several stages a rank, in whole steps: built, trained, guarded, evaluated and kept as with one."""

import pytest
import torch

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import UserCodeError
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.run_state import pieces_of
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train_step
from unisono.train.watch.copies import checksum
from unisono.train.watch.locate_nan import locate_nan
from unisono_contrib.comm import threads
from unisono_contrib.train.watch.guard import install

SEVERAL = ["interleaved", "looped_bfs", "zb1p", "zbv", "dualpipev"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return Recipe(
        seed=3,
        model=ModelConfig(n_layer=4, n_head=2, d_model=8, context=8, dropout=0.1, tie_embeddings=True),
        data=DataConfig(source=f"text:{folder}/text.txt"),
        train=TrainConfig(steps=8, global_batch=4, micro_batch=1, lr=1e-2, clip=0.5, dtype="float64"),
    )


def on_ranks(recipe, plan, schedule, body):
    """body(run, feeds) on every rank of a plan played by a schedule."""
    named = f"{plan} schedule={schedule}"
    ranks = resolve(recipe, named).plan.world

    def live(rank):
        resolved = resolve(recipe, named, ranks)
        corpus = load(resolved.recipe.data, resolved.recipe.model)
        place = place_of(rank, ranks, rank, threads.BACKEND, 60.0)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(rank))
        return body(run, *feeds(resolved.recipe, resolved.plan, corpus, place.device))

    return threads.run(ranks, live)


def trained(run, feed, val):
    reports = [train_step(run, feed.fetch(step, run.leaves)) for step in range(2)]
    loss, _ = evaluate(run, [val.fetch(0, run.leaves)])
    sums = {slot.name: checksum(slot.master).item() for slot in run.local.slots}
    return [(r.loss, r.norm) for r in reports], loss, sums


def whole(ranks):
    """What every rank says alike, and what each holds."""
    (numbers, loss), *others = [(numbers, loss) for numbers, loss, _ in ranks]
    assert all(other == (numbers, loss) for other in others)
    return numbers, loss, {name: value for _, _, sums in ranks for name, value in sums.items()}


def test_a_run_is_the_same_to_the_bit(recipe):
    wanted = whole(on_ranks(recipe, "pp=2", "1f1b", trained))
    for schedule in SEVERAL:
        assert whole(on_ranks(recipe, "pp=2", schedule, trained)) == wanted, schedule


@pytest.mark.parametrize("plan", ["pp=2", "shard=2 zero=3 pp=2", "pp=2 recompute=full"])
def test_the_ends_may_have_no_blocks(recipe, plan):
    """As practitioners take a layer off the first and the last of many stages, which have stem and head."""
    wanted = whole(on_ranks(recipe, plan, "1f1b", trained))
    assert whole(on_ranks(recipe, plan, "interleaved:v=3,cut=0/1/1/1/1/0", trained)) == wanted


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 pp=2",
        "dp=2 pp=2 sync=canonical",
        "pp=2 tp=2",
        "shard=2 zero=1 pp=2",
        "shard=2 zero=2 pp=2",
        "shard=2 zero=3 pp=2",
        "shard=2 zero=2 pp=2 sync=canonical",
        "pp=2 recompute=full",
    ],
)
def test_beside_the_rest_of_a_plan_too(recipe, plan):
    """ZB-V halves its backwards, but not where shards are gathered, or activations computed again, for just one: there
    B does all of it, and W nothing."""
    if plan == "dp=2 pp=2":
        # ZB-V has both uses of a tied weight on one rank, which adds them up before replicas meet and not after.
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"tie_embeddings": False})}
        )
    wanted = whole(on_ranks(recipe, plan, "1f1b", trained))
    for schedule in ("interleaved", "zbv"):
        assert whole(on_ranks(recipe, plan, schedule, trained)) == wanted, schedule


@pytest.mark.parametrize(
    "plan", ["pp=2 sync=canonical", "dp=2 pp=2 sync=canonical", "shard=2 zero=2 pp=2 sync=canonical"]
)
def test_two_copies_of_the_model_learn_as_one(recipe, plan):
    """DualPipe's halves are two branches of the tree over a replica's leaves, so canonical bits are those of 1F1B."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch": 8})})
    wanted = whole(on_ranks(recipe, plan, "1f1b", trained))
    assert whole(on_ranks(recipe, plan, "dualpipe", trained)) == wanted


@pytest.mark.parametrize("schedule", SEVERAL)
def test_what_is_kept_has_the_names_of_one_device(recipe, schedule):
    def kept(run, feed, val):
        train_step(run, feed.fetch(0, run.leaves))
        return [piece.name for piece in pieces_of(run) if piece.saved]

    (wanted,) = on_ranks(recipe, "dp=1", "accumulate", kept)
    both = on_ranks(recipe, "pp=2", schedule, kept)
    assert sorted(name for names in both for name in names) == sorted(wanted)
    assert all(both)


@pytest.mark.parametrize("schedule", SEVERAL)
def test_the_loss_is_where_the_last_stage_is(recipe, schedule):
    holders = on_ranks(recipe, "pp=2", schedule, lambda run, *_: run.local.holds_loss)
    assert holders == ([True, False] if schedule in ("zbv", "dualpipev") else [False, True])


# The guard -----------------------------------------------------------------------------------------------------------


def guarded(run, feed, val):
    check = install(run, 1)
    result = trained(run, feed, val)
    check()
    return result


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_guarded_run_is_the_same_and_nobody_is_accused(recipe, schedule):
    assert on_ranks(recipe, "pp=2", schedule, guarded) == on_ranks(recipe, "pp=2", schedule, trained)


@pytest.mark.parametrize("schedule, block", [("interleaved", 1), ("interleaved", 2), ("zb1p", 0), ("zbv", 3)])
def test_a_flipped_bit_in_the_gradient_of_any_stage_is_found(recipe, schedule, block):
    """Micro-batch 2 of each step has it."""
    name = f"blocks.{block}.mlp.up.weight"

    def spoilt(run, feed, val):
        player, tell = run.player, run.player.before_backward
        now = []

        def told(turn):
            now[:] = [turn.micro]
            tell(turn)

        def flip(grad):
            if now != [2] or not run.step:
                return grad
            grad = grad.clone()
            grad.view(-1)[3] += 1
            return grad

        player.before_backward = told
        for slot in run.local.slots:
            if slot.name == name:
                slot.live.register_hook(flip)
        install(run, 1)
        for step in range(8):
            run.step = 1 + step
            train_step(run, feed.fetch(step % 4, run.leaves))

    with pytest.raises(UserCodeError, match="micro-batch 2 of this rank, computed twice") as caught:
        on_ranks(recipe, "pp=2", schedule, spoilt)
    assert caught.value.code == "G02"
    assert caught.value.where.startswith(f"first in backward: the gradient of {name}")


# Blame ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, block", [("interleaved", 1), ("interleaved", 2), ("zbv", 0), ("zbv", 3)])
def test_the_first_bad_layer_is_named_whatever_stage_it_is_in(recipe, schedule, block):
    name = f"blocks.{block}.mlp.up.weight"

    def sick(run, feed, val):
        for slot in run.local.slots:
            if slot.name == name:
                slot.master.data[0, 0] = torch.nan
        leaves = feed.fetch(0, run.leaves)
        error = locate_nan(run, leaves, train_step(run, leaves), run.mesh.rank, "")
        return error and error.where

    told = [where for where in on_ranks(recipe, "pp=2", schedule, sick) if where]
    assert len(told) == 1
    assert f"first in {name.removesuffix('.weight')} (Linear) (its weight is not finite)" in told[0]


# One hash ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plans",
    [
        ["pp=2 interleaved", "pp=2 zb1p recompute=full", "dp=2 pp=2 dualpipe"],
        pytest.param(
            [
                "pp=4 zb2p recompute=selective", "pp=2 zbv offload=activations", "pp=2 dualpipe recompute=full",
                "pp=2 interleaved offload=optimizer", "dp=2 pp=2 zbv offload=optimizer", "pp=4 dualpipe",
                "dp=2 pp=2 interleaved recompute=selective offload=activations", "pp=2 dualpipev", "pp=2 looped_bfs",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_canonical_weights_are_one_devices_under_every_timetable(recipe, plans):
    """Recomputed, put away, in two copies or over two replicas: the same bits."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch": 16})})
    wanted = whole(on_ranks(recipe, "dp=1 sync=canonical", "accumulate", trained))
    for plan in plans:
        axes = [word for word in plan.split() if "=" in word]
        (name,) = (word for word in plan.split() if "=" not in word)
        assert whole(on_ranks(recipe, f"{' '.join(axes)} sync=canonical", name, trained)) == wanted, plan

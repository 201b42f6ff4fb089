"""The guard finds a flipped bit in a weight, a moment or a gradient, and names rank, tensor and step."""

import pytest
import torch

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import UserCodeError
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step
from unisono.train.watch.copies import checksum
from unisono_contrib.train.watch.guard import install, sampled

pytestmark = pytest.mark.timeout(120)

NAME = "blocks.0.mlp.up.weight"


def started(ctx, folder, plan, **train):
    """A run and its batches, on a small GPT over a text of the test's own."""
    text = f"{folder}/text.txt"
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(**{"steps": 8, "global_batch": 12, "micro_batch": 1, "lr": 1e-2, **train}),
    )
    resolved = resolve(recipe, plan, ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    return run, feeds(resolved.recipe, resolved.plan, corpus, place.device)[0]


def flip(x, element, bit):
    words = x.detach().view(-1).view({4: torch.int32, 8: torch.int64}[x.element_size()])
    words[element] ^= torch.tensor(1, dtype=words.dtype) << bit


def slot_of(run, name=NAME):
    return next(slot for slot in run.local.slots if slot.name == name)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    return str(tmp_path)


# Checksums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_every_single_bit_counts(dtype):
    x = torch.arange(5).to(dtype)
    size = x.element_size()
    whole = checksum(x).item()
    for byte in range(5 * size):
        for bit in range(8):
            y = x.clone()
            y.view(torch.uint8)[byte] ^= 1 << bit
            assert checksum(y).item() != whole


def test_a_checksum_is_of_values_not_of_where_they_lie():
    x = torch.randn(7, 6)
    shifted = torch.empty(43)[1:].view(7, 6).copy_(x)
    assert checksum(x) == checksum(shifted) == checksum(x.t().contiguous().t())
    assert checksum(torch.empty(0)) == 0


# A flipped bit -------------------------------------------------------------------------------------------------------


def with_flip(ctx, folder, plan, rank, kind, at, every, name=NAME, **train):
    """Train with a guard; before step `at`, flip one bit on one rank."""
    run, feed = started(ctx, folder, plan, **train)
    install(run, every)
    for step in range(8):
        if step == at and ctx.rank == rank:
            slot = slot_of(run, name)
            state = run.update.optimizer.state[slot.master]
            flip(slot.master if kind == "weight" else state[kind], 5, 27)
        train_step(run, feed.fetch(step, run.leaves))
    return True


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("at", [3, 4])
def test_the_odd_one_of_three_is_named(threads, folder, kind, at):
    with pytest.raises(UserCodeError) as caught:
        threads(with_flip, 3, folder=folder, plan="dp=3", rank=1, kind=kind, at=at, every=4)
    error = caught.value
    tensor = f"model/{NAME}" if kind == "weight" else f"optim/{NAME}/{kind}"
    assert error.code == "G01" and error.exit == 1 and error.rank == 1
    assert f"after step 4: the copy of rank 1 of {tensor} is not that of ranks 0, 2" in error.what
    if at == 4:
        assert "element [0, 5]" in error.where and "bit 27 alone" in error.where
    assert "step 0 or before" in error.fix


def test_of_two_both_are_named_and_what_a_flipped_bit_would_make(threads, folder):
    with pytest.raises(UserCodeError) as caught:
        threads(with_flip, 2, folder=folder, plan="dp=2", rank=1, kind="weight", at=2, every=2)
    error = caught.value
    assert error.code == "G01"
    assert f"after step 2: the copies of model/{NAME} on ranks 0, 1 differ" in error.what
    assert "bit 27 alone, as a flipped bit makes it; two copies cannot tell" in error.where


def test_ranks_that_cut_the_model_are_compared_where_they_hold_the_same(threads, folder):
    flipped = {"kind": "weight", "at": 2, "every": 2}
    with pytest.raises(UserCodeError, match=r"model/blocks.1.norm1.weight on ranks 0, 1 differ"):
        threads(with_flip, 2, folder=folder, plan="tp=2", rank=0, name="blocks.1.norm1.weight", **flipped)
    with pytest.raises(UserCodeError, match=r"model/stem.tok.weight on ranks 0, 1 differ"):
        threads(with_flip, 2, folder=folder, plan="pp=2", rank=1, name="head.out.weight", **flipped)


# Gradients -----------------------------------------------------------------------------------------------------------


def with_bad_gradient(ctx, folder, plan, rank, micro, every, steps=8, **train):
    """Train with a guard; on one rank the backward of one micro-batch of every step flips a bit of one gradient."""
    run, feed = started(ctx, folder, plan, **train)
    player, armed, hooked = run.player, [False], []
    tell = player.before_backward

    def noted(turn):
        armed[0] = ctx.rank == rank and turn.micro == micro
        tell(turn)

    def entering(module, _):
        if not hooked:  # under FSDP2 the gathered weight is here only now
            hooked.append(module.weight.register_hook(spoilt))

    def spoilt(grad):
        if armed[0]:
            grad = grad.clone()
            flip(grad, 7, 3)
        return grad

    player.before_backward = noted
    (stage,) = run.local.stages.values()
    stage.get_submodule(NAME.rpartition(".")[0]).register_forward_pre_hook(entering)
    install(run, every)
    for step in range(steps):
        train_step(run, feed.fetch(step, run.leaves))
    return True


@pytest.mark.parametrize("plan", ["dp=2 sync=canonical", "shard=2 zero=1", "shard=2 zero=3"])
def test_a_flipped_bit_in_a_gradient_is_found(threads, folder, plan):
    with pytest.raises(UserCodeError) as caught:
        threads(with_bad_gradient, 2, folder=folder, plan=plan, rank=1, micro=0, every=1, global_batch=2)
    error = caught.value
    assert error.code == "G02" and error.rank == 1
    assert error.what == "step 1: micro-batch 0 of this rank, computed twice, gives two gradients"
    assert error.where == f"first in backward: the gradient of {NAME}"


def test_it_is_found_in_the_step_that_samples_it(threads, folder):
    """Of m micro-batches one is computed twice, so a bad one is found with probability 1/m a checked step."""
    first = next(step for step in range(99) if sampled(3, step, 4) == 2)
    with pytest.raises(UserCodeError, match=f"^step {first + 1}: micro-batch 2"):
        threads(
            with_bad_gradient,
            2,
            folder=folder,
            plan="dp=2",
            rank=0,
            micro=2,
            every=1,
            steps=first + 1,
            global_batch=8,
        )


def test_every_micro_batch_is_as_likely():
    drawn = [sampled(seed, step, 4) for seed in range(4) for step in range(0, 100_000, 100)]
    for leaf in range(4):
        assert abs(drawn.count(leaf) / len(drawn) - 1 / 4) < 4 * (3 / 16 / len(drawn)) ** 0.5


# Gradients, by another replica ---------------------------------------------------------------------------------------


def with_bad_core(ctx, folder, plan, rank, backward=False, steps=4, neighbours=True, **train):
    """Train with a guard; on one rank the product of one layer has one bit flipped, always the same."""
    run, feed = started(ctx, folder, plan, **train)
    if ctx.rank == rank:
        (stage,) = run.local.stages.values()

        def wrong(module, inputs, y):
            if backward and y.requires_grad:
                y.register_hook(lambda grad: (bad := grad.clone(), flip(bad, 3, 20))[0])
            elif not backward:
                flip(y, 3, 20)

        stage.get_submodule(NAME.rpartition(".")[0]).register_forward_hook(wrong)
    install(run, 1, feed=feed if neighbours else None)
    for step in range(steps):
        train_step(run, feed.fetch(step, run.leaves))
    return True


def test_a_core_that_is_wrong_alike_each_time_agrees_with_itself(threads, folder):
    assert threads(with_bad_core, 3, folder=folder, plan="dp=3", rank=1, neighbours=False) == [True] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_the_odd_one_of_three_replicas_is_named(threads, folder, rank, backward):
    with pytest.raises(UserCodeError) as caught:
        threads(with_bad_core, 3, folder=folder, plan="dp=3", rank=rank, backward=backward)
    error = caught.value
    assert error.code == "G04" and error.exit == 1 and error.rank == rank
    assert error.what.startswith("step 2: ranks ")
    assert error.what.endswith(f"; that of rank {rank} is the odd one of three")
    assert error.where.startswith(
        "first in backward: the gradient of" if backward else "the loss differs already"
    )


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 sync=canonical", "dp=2 shard=2 zero=3"])
def test_two_replicas_are_both_named(threads, folder, plan):
    ranks = 4 if "shard" in plan else 2
    with pytest.raises(UserCodeError) as caught:
        threads(with_bad_core, ranks, folder=folder, plan=plan, rank=0, global_batch=8)
    error = caught.value
    assert error.code == "G04" and error.rank is None
    assert error.where == "the loss differs already: in the forward pass; two cannot tell which is right"


def test_in_a_pipeline_the_replica_is_named_by_the_rank_whose_gradient_differs(threads, folder):
    with pytest.raises(UserCodeError) as caught:
        threads(with_bad_core, 6, folder=folder, plan="dp=3 pp=2", rank=1, backward=True)
    error = caught.value
    assert error.code == "G04" and error.rank == 1


# Health --------------------------------------------------------------------------------------------------------------


def weights(ctx, folder, plan, every, **train):
    run, feed = started(ctx, folder, plan, **train)
    notes = []
    check = install(run, every, notes.append, feed)
    reports = [train_step(run, feed.fetch(step, run.leaves)) for step in range(3)]
    check()
    sums = {slot.name: checksum(slot.master).item() for slot in run.local.slots}
    return {"sums": sums, "losses": [r.loss for r in reports], "notes": notes}


PLANS = [
    "dp=2", "dp=2 sync=canonical", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3 sync=canonical", "tp=2",
    "pp=2", "pp=2 micros=4 recompute=full", "dp=2 precision=bf16", "dp=2 precision=fp16", "dp=2 codec=int8+ef",
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_guarded_run_computes_the_same_and_nobody_is_accused(threads, folder, plan):
    run = {"folder": folder, "plan": plan, "global_batch": 8, "micro_batch": None if "micros" in plan else 1}
    plain = threads(weights, 2, every=0, **run)
    guarded = threads(weights, 2, every=1, **run)
    assert guarded == plain
    assert not guarded[0]["notes"]


def test_one_rank_alone_is_told_what_is_left(threads, folder):
    (got,) = threads(weights, 1, folder=folder, plan="dp=1", every=2)
    assert "only gradients are checked" in got["notes"][0]

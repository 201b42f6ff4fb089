"""The player: every timetable that exists gives the gradients of one device, and tells of them as it says."""

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import nn

from unisono.comm.mesh import Mesh, Shape
from unisono.models.noise import Noise
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage, boundaries, cut, stage_of
from unisono.parallel.play import StagePlayer
from unisono.parallel.post import Wire
from unisono.programs.pipeline import COMPUTE, RECEIVES, lower, part_of
from unisono.programs.schedules import SCHEDULES
from unisono.spec.layout import Anatomy
from unisono_contrib.comm import threads

WIDTH, BATCH, CLASSES, BLOCKS = 6, 3, 5, 9
NAMES = SCHEDULES.names()
SPLIT = [name for name in NAMES if SCHEDULES.read(name).timetable(2, 8).splits_backward]


@dataclass(frozen=True)
class Micro:
    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    documents: torch.Tensor | None = None
    scale: float = 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH, bias=False),
        )

    def forward(self, x, noise):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x if noise is None else x * (1 + noise.samples[:, None] % 3 * noise.seed / 100)


class Both(Block):
    """Carries two tensors that learn, and whole numbers between them."""

    def forward(self, x, noise):
        if not isinstance(x, tuple):
            x = x, torch.arange(len(x), device=x.device), x.sin()
        main, whole, side = x
        return super().forward(main + side.flip(1), noise), whole + 1, torch.sin(side * main + whole[:, None])


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)

    def forward(self, tokens, noise):
        return self.table(tokens)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(x if not isinstance(x, tuple) else x[0] - x[2] + x[1][:, None])


class Model(nn.Module):
    def __init__(self, block=Block, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.head = Stem(), Head()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.anatomy = Anatomy()
        self.to(dtype)

    def loss(self, logits, targets):
        return nn.functional.cross_entropy(logits, targets, reduction="sum")


def micros(count):
    draw = torch.Generator().manual_seed(2)
    classes = [torch.randint(CLASSES, (2, BATCH), generator=draw) for _ in range(count)]
    return [Micro(*both, torch.arange(i * BATCH, (i + 1) * BATCH)) for i, both in enumerate(classes)]


@pytest.fixture(autouse=True)
def one_thread():
    """As many as a rank has: kernels that share out a sum add it in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(leaves, block=Block, dtype=torch.float32, seed=None):
    """Losses and gradients of the whole model on one device, one micro-batch after the other."""
    model, losses = Model(block, dtype), []
    for leaf in leaves:
        noise = None if seed is None else Noise(seed, leaf.samples)
        x = model.stem(leaf.inputs, noise)
        for part in model.blocks:
            x = part(x, noise)
        loss = model.loss(model.head(x), leaf.targets) * 0.5
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


def on_ranks(timetable, body, block=Block, dtype=torch.float32, change=lambda model: None, seed=None):
    """body(player, row) on every rank of a timetable. A second chain of stages is a second copy of the model.

    The player has `turns` and `done`: what it told of its backwards.
    """
    lowered, length = lower(timetable), timetable.length

    def live(rank):
        recorder = Recorder(rank)
        mesh = Mesh(Shape(pp=len(timetable.rows)), rank, recorder, timedelta(seconds=60))
        models = [Model(block, dtype) for _ in range(timetable.chains)]
        for model in models:
            change(model)
        blocks = cut(models[0], length)
        tokens = torch.empty(BATCH, dtype=torch.int64, device="meta")
        carries = [*boundaries(Model(block, dtype).to("meta"), blocks, tokens), ()] * timetable.chains
        wires = {i: Wire(mesh.pp, mesh.pp_back, carry) for i, carry in enumerate(carries)}
        owned = timetable.owned(rank)
        stages = {i: Stage(models[i // length], blocks[i % length], i % length, length) for i in owned}
        turns, done = [], []
        player = StagePlayer(
            stages,
            wires,
            recorder,
            nullcontext,
            turns.append,
            done.append,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        player.turns, player.done = turns, done
        return body(player, lowered.rows[rank])

    return threads.run(len(timetable.rows), live, seed=seed)


def grads_of(player):
    """(stage, name) → gradient."""
    return {(i, name): p.grad for i, stage in player.stages.items() for name, p in stage.named_parameters()}


def whole(ranks, length):
    """Losses, each counted once, and name → gradient, summed over copies of the model."""
    copies = defaultdict(list)
    for _, grads in ranks:
        for (stage, name), grad in grads.items():
            copies[name].append((stage // length, grad))
    ordered = {
        name: [grad for _, grad in sorted(found, key=lambda f: f[0])] for name, found in copies.items()
    }
    losses = torch.stack([losses for losses, _ in ranks]).sum(0)
    return losses, {name: sum(grads[1:], grads[0]) for name, grads in ordered.items()}


def played(name, ranks, leaves, block=Block, dtype=torch.float32, seed=None, order=None):
    timetable = SCHEDULES.read(name).timetable(ranks, len(leaves))

    def body(player, row):
        losses = player.play(row, leaves, 0.5, seed)
        return losses, grads_of(player)

    return whole(on_ranks(timetable, body, block, dtype, seed=order), timetable.length)


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_gives_the_bits_of_one_device(name, ranks):
    """Also those that `train` does not take yet. All sum micro-batches in ascending order; DualPipe has the weights
    twice, each copy sums its half, and who adds up the two sums in a run is not the player's affair."""
    leaves = micros(8)
    twice = SCHEDULES.read(name).timetable(ranks, 8).chains > 1
    dtype = torch.float64 if twice else torch.float32
    losses, grads = played(name, ranks, leaves, dtype=dtype, seed=7)
    wanted_losses, wanted = alone(leaves, dtype=dtype, seed=7)
    assert torch.equal(losses, wanted_losses)
    if twice:
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)
    else:
        assert same(grads, wanted)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_which_rank_is_quicker_changes_nothing(name):
    leaves = micros(8)
    first, second = (played(name, 2, leaves, order=order) for order in (1, 2))
    assert torch.equal(first[0], second[0]) and same(first[1], second[1])


@pytest.mark.parametrize("name", ["1f1b", "looped_bfs", "zb1p", "zbv"])
def test_several_tensors_cross_a_boundary(name):
    """Two that learn, and whole numbers, which have no gradient to send back."""
    leaves = micros(4)
    losses, grads = played(name, 2, leaves, Both)
    wanted_losses, wanted = alone(leaves, Both)
    assert torch.equal(losses, wanted_losses) and same(grads, wanted)


def test_what_crosses_is_found_on_meta():
    model = Model(Both)
    blocks = cut(model, 3)
    tokens = torch.empty(BATCH, dtype=torch.int64, device="meta")
    carries = boundaries(model.to("meta"), blocks, tokens)
    about = [(tuple(x.shape), x.dtype) for carry in carries for x in carry]
    assert (
        about
        == [((BATCH, WIDTH), torch.float32), ((BATCH,), torch.int64), ((BATCH, WIDTH), torch.float32)] * 2
    )


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_a_stage_that_learns_nothing_passes_on_what_there_is(name):
    """All but the last block and the head are frozen, so the first stage has no gradient at all."""
    leaves, last = micros(4), f"blocks.{BLOCKS - 1}."

    def frozen(model):
        for path, p in model.named_parameters():
            p.requires_grad_(path.startswith((last, "head.")))

    def body(player, row):
        return player.play(row, leaves, 0.5, None), grads_of(player)

    timetable = SCHEDULES.read(name).timetable(3, 4)
    _, grads = whole(on_ranks(timetable, body, change=frozen), 3)
    _, wanted = alone(leaves)
    for path, grad in grads.items():
        if path.startswith((last, "head.")):
            assert torch.equal(grad, wanted[path])
        else:
            assert grad is None


def test_a_stage_that_ignores_its_input_is_an_error():
    leaves = micros(2)

    class Deaf(Block):
        def forward(self, x, noise):
            return super().forward(torch.ones_like(x), noise)

    with pytest.raises(RuntimeError, match="a stage's output does not depend on its input"):
        played("1f1b", 2, leaves, Deaf)


# What it tells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_tells_of_each_backward_towards_weights(name):
    """In ascending order for each stage; `last` once for each stage, `final` once for the rank; and of the gradients,
    when they are there."""
    leaves = micros(8)
    timetable = SCHEDULES.read(name).timetable(2, 8)

    def body(player, row):
        player.play(row, leaves, 0.5, None)
        return player.turns, player.done, tuple(player.stages)

    for told, done, stages in on_ranks(timetable, body):
        assert [turn.micro for turn in told] == done
        for stage in stages:
            own = [turn for turn in told if turn.stage == stage]
            assert [turn.micro for turn in own] == list(timetable.micros_of(stage))
            assert [turn.last for turn in own] == [False] * (len(own) - 1) + [True]
        assert [turn.final for turn in told] == [False] * (len(told) - 1) + [True]


@pytest.mark.parametrize("name", SPLIT)
def test_weights_wait_for_their_own_turn(name):
    """B changes no weight's gradient where the timetable has W."""
    leaves, timetable = micros(8), SCHEDULES.read(name).timetable(2, 8)

    def body(player, row):
        towards_inputs, early = player._backward_to_inputs, []

        def watched(action):
            before = {key: None if grad is None else grad.clone() for key, grad in grads_of(player).items()}
            towards_inputs(action)
            after = grads_of(player)
            early.extend(k for k, g in before.items() if (g is None) != (after[k] is None))
            early.extend(k for k, g in before.items() if g is not None and not torch.equal(g, after[k]))

        player._backward_to_inputs = watched
        player.play(row, leaves, 0.5, None)
        return early

    assert on_ranks(timetable, body) == [[], []]


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_receives_are_asked_for_before_the_computation_that_hides_them(name):
    leaves, timetable = micros(4), SCHEDULES.read(name).timetable(2, 4)

    def body(player, row):
        log = []

        def logged(function):
            def call(action):
                log.append(action)
                return function(action)

            return call

        for owner, name in ((player.post, "_ask"), (player, "_forward"), (player, "_backward")):
            setattr(owner, name, logged(getattr(owner, name)))
        player.play(row, leaves, 0.5, None)
        return log, row

    for log, row in on_ranks(timetable, body):
        received = [action for action in row if action.kind in RECEIVES]
        assert received and [action for action in log if action.kind in RECEIVES] == received
        for action in received:
            before = sum(a.kind in COMPUTE for a in row[: row.index(action)])
            begun = sum(a.kind in COMPUTE for a in log[: log.index(action)])
            assert begun == max(0, before - 1)


# Evaluation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_forwards_alone_give_the_losses_and_leave_nothing(name):
    """Several stages a rank too: each micro-batch passes all of them, in the order of the timetable."""
    leaves = micros(8)
    timetable = SCHEDULES.read(name).timetable(2, 8)
    forwards = part_of(timetable, lambda action: action.kind == "F")

    def body(player, _):
        row = forwards.rows[0 if 0 in player.stages else 1]
        with torch.no_grad():
            losses = player.play(row, leaves, 0.5, None)
        return losses, grads_of(player), player.turns

    ranks = on_ranks(timetable, body)
    wanted, _ = alone(leaves)
    assert torch.equal(torch.stack([losses for losses, _, _ in ranks]).sum(0), wanted)
    assert all(grad is None for _, grads, _ in ranks for grad in grads.values())
    assert all(turns == [] for _, _, turns in ranks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro", [0, 5])
def test_one_micro_batch_alone_is_played_by_the_stages_that_it_passes(name, micro):
    leaves = micros(8)
    timetable = SCHEDULES.read(name).timetable(2, 8)
    one = part_of(timetable, lambda action: action.micro == micro)
    counted = Counter(a.kind for row in one.rows for a in row)
    assert counted["F"] == counted["B"] == timetable.length

    def body(player, _):
        row = one.rows[0 if 0 in player.stages else 1]
        return player.play(row, leaves, 0.5, None), {
            k: g for k, g in grads_of(player).items() if g is not None
        }

    losses, grads = whole(on_ranks(timetable, body), timetable.length)
    wanted_losses, wanted = alone(leaves[micro : micro + 1])
    assert losses[micro] == wanted_losses[0] and losses.count_nonzero() == 1
    assert same(grads, wanted)


def test_a_parameter_is_where_its_block_is():
    model = Model()
    blocks = cut(model, 3)
    for at in range(3):
        stage = Stage(model, blocks[at], at, 3)
        assert {stage_of(name, blocks) for name, _ in stage.named_parameters()} == {at}

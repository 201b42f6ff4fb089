"""The player: every timetable that exists gives the gradients of one device, and tells of them as it says."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.parallel.wires import Post, together
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage, boundaries, cut
from unisono.parallel.play import StagePlayer, Wire
from unisono.programs.pipeline import lower
from unisono.programs.schedules import SCHEDULES
from unisono.spec.layout import Anatomy

WIDTH, BATCH, CLASSES, BLOCKS = 6, 3, 5, 9
NAMES = SCHEDULES.names()


@dataclass(frozen=True)
class Micro:
    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor


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
        return x if noise is None else x * (1 + noise.samples[:, None] % 3 * noise.seed)


class Both(Block):
    """A block that carries two tensors that learn, and whole numbers beside them."""

    def forward(self, x, noise):
        if not isinstance(x, tuple):
            x = x, x.sin(), torch.arange(len(x))
        main, side, whole = x
        return super().forward(main + side.flip(1), noise), side * main + whole[:, None], whole + 1


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
        return self.out(x if not isinstance(x, tuple) else x[0] - x[1] + x[2][:, None])


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

    def forward(self, tokens, noise=None):
        x = self.stem(tokens, noise)
        for block in self.blocks:
            x = block(x, noise)
        return self.head(x)


def micros(count):
    draw = torch.Generator().manual_seed(2)
    return [
        Micro(
            torch.randint(CLASSES, (BATCH,), generator=draw),
            torch.randint(CLASSES, (BATCH,), generator=draw),
            torch.arange(i * BATCH, (i + 1) * BATCH),
        )
        for i in range(count)
    ]


class Ranks:
    """All ranks of a timetable in this process; a second chain has a copy of the model of its own."""

    def __init__(self, timetable, block=Block, dtype=torch.float32, told=None):
        self.timetable, self.post = lower(timetable), Post()
        self.models = [Model(block, dtype) for _ in range(timetable.chains)]
        length = timetable.length
        blocks = cut(self.models[0], length)
        meta = Model(block, dtype).to("meta")
        carries = boundaries(meta, blocks, torch.empty(BATCH, dtype=torch.int64, device="meta"))
        self.players = []
        for rank in range(len(timetable.rows)):
            owned = timetable.owned(rank)
            ends = self.post.group("ahead", rank), self.post.group("back", rank)
            wires = {
                chain * length + i: Wire(*ends, carry)
                for chain in range(timetable.chains)
                for i, carry in enumerate(carries)
            }
            stages = {
                i: Stage(self.models[i // length], blocks[i % length], i % length, length) for i in owned
            }
            note = told[rank].append if told else lambda turn: None
            self.players.append(
                StagePlayer(
                    stages,
                    wires,
                    Recorder(rank),
                    nullcontext,
                    lambda turn, note=note: note(turn),
                    dtype=dtype,
                    device=torch.device("cpu"),
                )
            )

    def play(self, leaves, timetable=None, seed=None):
        """The losses of all leaves, each counted once."""
        rows = (timetable or self.timetable).rows
        players = enumerate(self.players)
        parts = together([lambda i=i, p=p: p.play(rows[i], leaves, 0.5, seed) for i, p in players])
        return torch.stack(parts).sum(0)

    def grads(self):
        """Name → gradient, summed over the copies of the model."""
        found = [dict(model.named_parameters()) for model in self.models]
        return {name: sum(one[name].grad for one in found) for name in found[0]}


def alone(leaves, block=Block, dtype=torch.float32, seed=None):
    """Losses and gradients of the whole model, one micro-batch after the other."""
    from unisono.models.noise import Noise

    model, losses = Model(block, dtype), []
    for leaf in leaves:
        noise = None if seed is None else Noise(seed, leaf.samples)
        loss = model.loss(model(leaf.inputs, noise), leaf.targets) * 0.5
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


def same(made, wanted):
    return made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in wanted)


def table(name, ranks, count=8):
    return SCHEDULES.read(name).timetable(ranks, count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_gives_the_bits_of_one_device(name, ranks):
    """Also those that `train` does not take yet. DualPipe has the weights twice, and adds up two sums."""
    timetable = table(name, ranks)
    dtype = torch.float64 if timetable.chains > 1 else torch.float32
    leaves = micros(8)
    all_ranks = Ranks(timetable, dtype=dtype)
    losses = all_ranks.play(leaves, seed=7)
    wanted_losses, wanted = alone(leaves, dtype=dtype, seed=7)
    assert torch.equal(losses, wanted_losses)
    if timetable.chains == 1:
        assert same(all_ranks.grads(), wanted)
    else:
        torch.testing.assert_close(all_ranks.grads(), wanted, rtol=1e-12, atol=1e-12)

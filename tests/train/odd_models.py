"""Models of a user's, with what our own never have: parameters that no loss depends on, or some batches alone; frozen
stages; a loss of their own."""

import torch
import torch.nn.functional as F
from torch import nn

from unisono.spec.layout import Anatomy, Split

WIDTH = 8


class Stem(nn.Module):
    """spare: nothing depends on it. seldom: added where a micro-batch begins with one of a few characters."""

    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)
        self.spare = nn.Parameter(torch.ones(5))
        self.seldom = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, noise=None):
        y = self.table(x)
        return y + self.seldom if x.is_meta or x[0, 0] % 8 == 0 else y


class Plain(Stem):
    """`seldom` is always used: sharded, all ranks must take the same way."""

    def forward(self, x, noise=None):
        return self.table(x) + self.seldom


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, noise=None):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, x):
        return self.out(x)


class Odd(nn.Module):
    def __init__(self, vocab, anatomy):
        super().__init__()
        self.stem = Stem(vocab)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Head(vocab)
        self.anatomy = anatomy

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


class Smoothed(Odd):
    """A loss that is not the plain cross-entropy."""

    def loss(self, logits, targets):
        flat = logits.flatten(0, -2)
        smooth = F.cross_entropy(flat, targets.flatten(), reduction="sum", label_smoothing=0.3)
        return smooth + 0.01 * torch.logsumexp(flat, -1).square().sum()


SPLITS = {
    "stem.table": Split.VOCAB_IN,
    "blocks.*.up": Split.COLUMN,
    "blocks.*.down": Split.ROW,
    "head.out": Split.VOCAB_OUT,
}


def anatomy(context, **more):
    return Anatomy(splits=SPLITS, divides={"feed-forward": 2 * WIDTH}, sequence=context, **more)


def odd(vocab, context):
    return Odd(vocab, Anatomy())


def tied(vocab, context):
    model = Odd(vocab, Anatomy(ties=(("head.out.weight", "stem.table.weight"),)))
    model.head.out.weight = model.stem.table.weight
    return model


def tied_frozen(vocab, context):
    """A tied weight that does not learn."""
    model = tied(vocab, context)
    model.head.out.weight.requires_grad_(False)
    return model


class Twins(Odd):
    """Two uses of one weight, of which none is ever made."""

    def __init__(self, vocab):
        super().__init__(vocab, Anatomy(ties=(("head.spare", "stem.spare"),)))
        self.head.spare = self.stem.spare


def twins(vocab, context):
    return Twins(vocab)


def split(vocab, context):
    return Odd(vocab, anatomy(context))


def smoothed(vocab, context):
    return Smoothed(vocab, anatomy(context))


def frozen(vocab, context):
    """The last stage of two has nothing to train."""
    model = Odd(vocab, Anatomy())
    for part in (model.blocks[1], model.head):
        part.requires_grad_(False)
    return model


def still(vocab, context):
    model = Odd(vocab, Anatomy())
    model.stem = Plain(vocab)
    return model

"""Models of a user's whose stages need more of each other than one tensor: skip connections from early blocks to late
ones, and a weight under two names in any two blocks."""

import torch
import torch.nn.functional as F
from torch import nn

from unisono.spec.layout import Anatomy

WIDTH = 6


class Stem(nn.Module):
    """Begins the carry: what is computed on, and the encoder's outputs so far, of which there are none."""

    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)

    def forward(self, tokens, noise=None):
        return (self.table(tokens),)


class Down(nn.Module):
    """Encodes, and leaves its output for the decoder's block at the same depth."""

    def __init__(self):
        super().__init__()
        self.mix, self.bend = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, carry, noise=None):
        x, *skips = carry
        x = x + torch.tanh(self.bend(torch.sin(self.mix(x))))
        return x, *skips, x


class Up(nn.Module):
    """Decodes with the last output that was left, which ends its ride here."""

    def __init__(self):
        super().__init__()
        self.mix, self.bend = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, carry, noise=None):
        x, *skips, skip = carry
        x = x + self.bend(torch.tanh(self.mix(torch.cat([x, skip.cos()], -1))))
        return x, *skips


class Head(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.out = nn.Linear(WIDTH, vocab)

    def forward(self, carry):
        (x,) = carry
        return self.out(x)


class UNet(nn.Module):
    """ties: pairs (alias, owner) of `bend.weight` of two blocks."""

    def __init__(self, vocab, depth=4, ties=()):
        super().__init__()
        self.stem, self.head = Stem(vocab), Head(vocab)
        self.blocks = nn.ModuleList([Down() for _ in range(depth)] + [Up() for _ in range(depth)])
        for alias, owner in ties:
            self.blocks[alias].bend.weight = self.blocks[owner].bend.weight
        named = tuple(tuple(f"blocks.{i}.bend.weight" for i in pair) for pair in ties)
        self.anatomy = Anatomy(ties=named)

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def unet(vocab, context):
    return UNet(vocab)


def tied_inside(vocab, context):
    """Of an early and a late middle block, of two neighbours, and of two that may share a stage."""
    return UNet(vocab, ties=((6, 1), (4, 3)))


def tied_first(vocab, context):
    """Of the first stage and one that is not the last."""
    return UNet(vocab, ties=((2, 0), (7, 5)))

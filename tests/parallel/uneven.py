"""A model of a user's whose blocks cost what their matrices do not tell: some repeat their product many times."""

import torch
import torch.nn.functional as F
from torch import nn

from unisono.spec.layout import Anatomy

WIDTH, TIMES = 32, (1, 1, 1, 1, 1, 1, 24, 24)


class Stem(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)

    def forward(self, tokens, noise=None):
        return self.table(tokens)


class Block(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.mix, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, x, noise=None):
        for _ in range(self.times):
            x = x + torch.tanh(self.mix(x))
        return x


class Uneven(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.stem, self.head = Stem(vocab), nn.Linear(WIDTH, vocab)
        self.blocks = nn.ModuleList(map(Block, TIMES))
        self.anatomy = Anatomy()

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def uneven(vocab, context):
    return Uneven(vocab)

"""A module with a tie, running statistics, and rows that no number of ranks divides."""

import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, vocab, context):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, 12), nn.BatchNorm1d(context)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 21), nn.GELU(), nn.Linear(21, 12))
        self.head = nn.Linear(12, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))


def net(vocab, context):
    return Net(vocab, context)

"""A training step proven under DDP: python examples/stack_step.py. docs/stacks.md has the other stacks."""

import sys

import torch
from torch.nn.functional import cross_entropy

import unisono


class Digits(unisono.TrainingStep):
    """What one device computes."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

    def batch(self, number):
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(5, 6, generator=drawn), torch.randint(0, 4, (5,), generator=drawn)

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)


class Hasty(Digits):
    """The optimiser is called after each micro-batch."""

    def train(self, place):
        for batch in place.batches:
            self.loss(place.model, batch).backward()
            place.optimizer.step()
            place.optimizer.zero_grad()


if __name__ == "__main__":
    for stack in sys.argv[1:] or ["ddp"]:
        print(stack, "right:", unisono.check_stack(stack, Digits, ranks=2, micros=2))
    print("ddp, hasty:", unisono.check_stack("ddp", Hasty, ranks=2, micros=2))

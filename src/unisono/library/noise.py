"""Randomness inside the model differs from rank to rank, randomness outside it is the same on all.

One device drops other elements of each sample; ranks that share a random state would drop the same ones of theirs.
So while the model runs in training, the CPU's generator is one of this rank's own; around it, the script's goes on
undisturbed and equal on every rank, so that orders and choices drawn there agree.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.device import seed_models


def seed_of(seed: int, rank: int) -> int:
    """A seed of one rank's own, from one that all share."""
    drawn = hashlib.blake2b(f"noise {seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") >> 1


class RandomStream:
    """The stream of one model on one rank. `state` is what its next forward begins with."""

    def __init__(self, model: nn.Module, seed: int, rank: int) -> None:
        own = seed_of(seed, rank)
        self.state: Tensor = torch.Generator().manual_seed(own).get_state()
        self._outside: Tensor | None = None
        self._depth = 0
        seed_models(model.parameters(), own)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: nn.Module, _: Any) -> None:
        self._depth += 1
        if self._depth == 1 and model.training:
            self._outside = torch.get_rng_state()
            torch.set_rng_state(self.state)

    def _leave(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._outside is not None:
            self.state = torch.get_rng_state()
            torch.set_rng_state(self._outside)
            self._outside = None

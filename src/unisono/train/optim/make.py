"""Build the optimiser of one rank."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from unisono.config import TrainConfig
from unisono.parallel.params import Slot


def make(train: TrainConfig, slots: Sequence[Slot], device: torch.device) -> Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) or SGD with momentum; matrices decay, vectors do not, as in GPT-2.

    Every state tensor exists from the start, so that a checkpoint can be loaded into it.
    """
    # An alias whose owner lies on this rank shares its storage and must not be stepped twice.
    owned = {s.master.data_ptr() for s in slots if not s.alias}
    own = [s for s in slots if s.live.requires_grad and not (s.alias and s.master.data_ptr() in owned)]
    groups = [
        {"params": [s.master for s in own if len(s.shape) >= 2], "weight_decay": train.weight_decay},
        {"params": [s.master for s in own if len(s.shape) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = train.fused and device.type in ("cpu", "cuda")
    if train.optimizer == "sgd":
        optimizer: Optimizer = SGD(groups, lr=train.lr, momentum=train.momentum, fused=fused)
    else:
        optimizer = AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=fused)
    prime(optimizer)
    return optimizer


def prime(optimizer: Optimizer) -> None:
    """Create the state that the optimiser would create in its first step, as zeros."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if isinstance(optimizer, SGD):
                if group["momentum"]:
                    state["momentum_buffer"] = torch.zeros_like(p)
            else:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if p.is_cuda else "cpu")
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_of(optimizer: Optimizer, master: nn.Parameter) -> dict[str, torch.Tensor]:
    """The optimiser's tensors for one parameter; empty if it does not step it."""
    return {k: v for k, v in optimizer.state.get(master, {}).items() if isinstance(v, torch.Tensor)}

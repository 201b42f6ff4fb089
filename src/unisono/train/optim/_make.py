"""Build the optimiser of one rank."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.config import TrainConfig
from unisono.parallel.params import Slot

LANES = 64  # bytes of the widest vector register


def make(train: TrainConfig, slots: Sequence[Slot], device: torch.device, even: bool = False) -> Optimizer:
    """The recipe's optimiser over the local tensors of a rank's slots; matrices decay, vectors do not, as in GPT-2.

    Every state tensor exists from the start, so that a checkpoint can be loaded into it. even: give each element the
    same bits wherever a tensor is cut (see `_evened`).
    """
    # An alias whose owner lies on this rank shares its storage and must not be stepped twice.
    owned = {s.master.data_ptr() for s in slots if not s.alias}
    own = [s for s in slots if s.live.requires_grad and not (s.alias and s.master.data_ptr() in owned)]
    pairs = {s.master: _evened(s.master) for s in own if even and s.master.nbytes % LANES}
    groups = [
        {
            "params": [pairs.get(s.master, s.master) for s in own if (len(s.shape) >= 2) == matrix],
            "weight_decay": train.weight_decay if matrix else 0.0,
        }
        for matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]  # a frozen stage has none
    fused = train.fused and device.type in ("cpu", "cuda")
    member = train.optimiser()
    optimizer = member.bind(groups, train.lr, fused)
    for parameter in (p for group in groups for p in group["params"]):
        optimizer.state[parameter] = member.state(parameter)
    if pairs:
        _pair(optimizer, pairs)
    return optimizer


def _evened(master: nn.Parameter) -> nn.Parameter:
    """A stand-in whose length fills vector registers. Torch's fused kernels round the last few elements of a tensor
    (those that do not fill a register) in another way than the rest, and which those are depends on the cut."""
    lanes = LANES // master.element_size()
    return nn.Parameter(master.new_zeros(-(-master.numel() // lanes) * lanes))


def _pair(optimizer: Optimizer, pairs: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Step the stand-ins, and keep masters and their state as views of what they hold."""
    for master, stand_in in pairs.items():
        n = master.numel()
        optimizer.state[master] = {
            key: value[:n].view(master.shape) if value.dim() else value
            for key, value in optimizer.state[stand_in].items()
        }

    @torch.no_grad()
    def before(*_: object) -> None:
        for master, stand_in in pairs.items():
            if master.grad is None:
                stand_in.grad = None
                continue
            if stand_in.grad is None:
                stand_in.grad = torch.zeros_like(stand_in)
            n = master.numel()
            stand_in[:n].copy_(master.view(-1))
            stand_in.grad[:n].copy_(master.grad.reshape(-1))

    @torch.no_grad()
    def after(optimizer: Optimizer, *_: object) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for master, stand_in in pairs.items():
            if master.grad is not None:
                master.copy_(stand_in[: master.numel()].view(master.shape))
                if scaled and stand_in.grad is not None:  # as the kernel left it
                    master.grad.copy_(stand_in.grad[: master.numel()].view(master.shape))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_of(optimizer: Optimizer, master: nn.Parameter) -> dict[str, torch.Tensor]:
    """The optimiser's tensors for one parameter; empty if it does not step it."""
    return {k: v for k, v in optimizer.state.get(master, {}).items() if isinstance(v, torch.Tensor)}

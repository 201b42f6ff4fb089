"""Initial values, by name: the same whatever is cut."""

import torch
from torch import nn

from unisono.parallel.pass_context import PassContext, Stages


@torch.no_grad()
def fill(stages: Stages, context: PassContext) -> None:
    """Give every parameter its part of the full initial tensor, on the device and in the dtype of this rank.

    Where values come later, into what a rank holds in the end, parameters that `shard` is going to deal stay without
    storage, so that no rank ever has that of others too.
    """
    owners = context.owners
    for stage in stages.values():
        if context.values is None and context.plan.shard > 1:
            stage.to(dtype=context.dtype)
        else:
            settle(stage, context)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(owners.get(name, name) not in context.frozen)
            if context.values is None:
                continue
            full = context.values(owners.get(name, name))
            cuts = (
                context.dealt[name].cuts if name in context.dealt else filter(None, [context.cuts.get(name)])
            )
            for cut in cuts:
                full = full.narrow(cut.dim, cut.start, cut.size)
            parameter.copy_(full)


@torch.no_grad()
def settle(stage: nn.Module, context: PassContext) -> None:
    """Give a stage storage, if it has none, on the device and in the dtype of this rank."""
    if any(p.is_meta for p in stage.parameters()):
        stage.to_empty(device=context.device)
        for buffer in stage.buffers():
            buffer.zero_()
        for refill in filter(None, (getattr(module, "refill", None) for module in stage.modules())):
            refill()  # buffers with values of their own
    stage.to(device=context.device, dtype=context.dtype)

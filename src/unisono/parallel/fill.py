"""Initial values, by name: the same whatever is cut."""

import torch
from torch import nn

from unisono.parallel.site import Site, Stages


@torch.no_grad()
def fill(stages: Stages, site: Site) -> None:
    """Give every parameter its part of the full initial tensor, on the device and in the dtype of this rank.

    Where values come later, into what a rank holds in the end, parameters that `shard` is going to deal stay without
    storage, so that no rank ever has that of others too.
    """
    owners = site.owners
    for stage in stages.values():
        if site.values is None and site.plan.shard > 1:
            stage.to(dtype=site.dtype)
        else:
            settle(stage, site)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(owners.get(name, name) not in site.frozen)
            if site.values is None:
                continue
            full = site.values(owners.get(name, name))
            cuts = site.dealt[name].cuts if name in site.dealt else filter(None, [site.cuts.get(name)])
            for cut in cuts:
                full = full.narrow(cut.dim, cut.start, cut.size)
            parameter.copy_(full)


@torch.no_grad()
def settle(stage: nn.Module, site: Site) -> None:
    """Give a stage storage, if it has none, on the device and in the dtype of this rank."""
    if any(p.is_meta for p in stage.parameters()):
        stage.to_empty(device=site.device)
        for buffer in stage.buffers():
            buffer.zero_()
        for refill in filter(None, (getattr(module, "refill", None) for module in stage.modules())):
            refill()  # buffers with values of their own
    stage.to(device=site.device, dtype=site.dtype)

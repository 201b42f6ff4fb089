"""Initial values, by name: the same whatever is cut."""

import torch

from unisono.parallel.site import Site, Stages


@torch.no_grad()
def fill(stages: Stages, site: Site) -> None:
    """Give every parameter its part of the full initial tensor, on the device and in the dtype of this rank."""
    owners = site.owners
    for stage in stages.values():
        if any(p.is_meta for p in stage.parameters()):
            stage.to_empty(device=site.device)
            for buffer in stage.buffers():
                buffer.zero_()
        stage.to(device=site.device, dtype=site.dtype)
        for name, parameter in stage.named_parameters():
            full = site.values(owners.get(name, name))
            cuts = site.dealt[name].cuts if name in site.dealt else filter(None, [site.cuts.get(name)])
            for cut in cuts:
                full = full.narrow(cut.dim, cut.start, cut.size)
            parameter.copy_(full)

"""A stage that FSDP2 has sharded, as the plain module that it was: for a computation of one's own on whole weights."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gathered(stage: nn.Module) -> Iterator[None]:
    """While it lasts, the parameters of `stage` are whole and plain, and FSDP2's hooks around forward are off. So
    `torch.func` may work with it, and no backward through it scatters gradients. Nothing changes for a stage that is
    not sharded. Every rank that holds a part calls it, or it hangs."""
    sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    if isinstance(stage, FSDPModule):
        stage._get_fsdp_state()._lazy_init()  # else the first block to be gathered would think that it is the root
    kept = [(hooks, dict(hooks)) for m in sharded for hooks in (m._forward_pre_hooks, m._forward_hooks)]  # type: ignore[attr-defined]
    for module in sharded:
        module.unshard()
        state = module._get_fsdp_state()
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            for hooks, _ in kept:
                hooks.pop(handle.id, None)
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
        for module in sharded:
            module.reshard()

"""Random numbers for a sharded parameter, as `reset_parameters` and `nn.init` draw them: those of one device.

Each rank draws for the whole tensor, from the generator that is the same on all ranks, and keeps its rows. By itself
torch draws for each rank's rows from the beginning.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

_aten = torch.ops.aten
_DRAWS = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default)


def draw_whole() -> None:
    """From now on, in this process."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operation in _DRAWS:
        handlers[operation] = _drawn


def _drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    x, *how = args
    local = x.to_local()
    whole = operation(local.new_empty(x.shape), *how, **kwargs)
    local.copy_(distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None).to_local())
    return x

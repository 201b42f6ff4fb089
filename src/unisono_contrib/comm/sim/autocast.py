"""Mixed precision on the simulated device: products in the narrow dtype, what sums many numbers in float32, as torch
has it on GPUs. torch leaves both lists to each device of this kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_NARROW = (
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d", "conv3d",
    "scaled_dot_product_attention",
)  # fmt: skip
_WIDE = (
    "exp", "log", "pow.Tensor_Scalar", "rsqrt", "softplus", "layer_norm", "group_norm", "rms_norm", "nll_loss",
    "cross_entropy_loss", "mse_loss", "softmax.int", "log_softmax.int", "logsumexp", "cumsum", "prod", "sum",
    "sum.dim_IntList", "norm.Scalar",
)  # fmt: skip
_KEY = "AutocastPrivateUse1"


def register_autocast(kind: str) -> list[Any]:
    """Let `torch.autocast(kind)` work. What is returned has to be kept."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for names, dtype in ((_NARROW, lambda: torch.get_autocast_dtype(kind)), (_WIDE, lambda: torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _cast(op, dtype), _KEY)
    return [everything, aten]


def _cast(op: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    keys: Any = torch._C.DispatchKey
    beneath = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def call(*args: Any, **kwargs: Any) -> Any:
        def cast(x: Any) -> Any:
            is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
            return x.to(dtype()) if is_cast else x

        with torch._C._ExcludeDispatchKeyGuard(beneath):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return call

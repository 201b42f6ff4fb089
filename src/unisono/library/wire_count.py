"""How many numbers a rank hands to the sums between ranks."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SummedNumbers(TorchDispatchMode):
    """While it is on, counts the numbers that go into all-reduces and reduce-scatters, of DDP's and FSDP's too."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.name():
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, Tensor)]
            # A reduce-scatter has its output, the smaller one, beside its input.
            self.numbers += max(sizes, default=0) if "scatter" in func.name() else sum(sizes)
        return func(*args, **(kwargs or {}))

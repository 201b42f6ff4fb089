"""In the first steps: sees every loss before its backward, every gradient that is asked for, and every operation of
torch that cannot take a shard."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.library.following import Following
from unisono.library.modes import place_function_mode
from unisono.library.traces import SampleTrace
from unisono.spec.errors import UsageError

_WRAPPED: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]


class Backwards(TorchFunctionMode):
    """While it is on, shows every loss to `seen` before its backward. following: on and off with it, and off in the
    backward."""

    def __init__(self, seen: Callable[[Tensor], None], following: Following | None = None) -> None:
        super().__init__()
        self._seen, self._following, self.on = seen, following, False
        self.sharded: Callable[[Tensor], bool] = lambda x: False  # whether it is a parameter that is dealt

    def switch(self, on: bool) -> None:
        """On or off."""
        if self._following is not None:
            self._following.switch(on)
        if on or self.on:
            self.on = place_function_mode(self, on)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            losses = [args[0]] if isinstance(args[0], Tensor) else args[0]
            with nullcontext() if self._following is None else self._following.paused():
                with torch._C.DisableTorchFunction():
                    for loss in losses:
                        self._seen(loss)
                found = func(*args, **kwargs)
            if self._following is not None:
                self._following.end()
            return found
        try:
            if func is torch.autograd.grad and self._following is not None:
                return self._asked(self._following, args, kwargs)
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, AttributeError, ValueError, AssertionError) as error:
            if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
                raise _of_shards(func, error) from error
            raise

    def _asked(self, following: Following, args: Any, kwargs: Any) -> Any:
        """torch.autograd.grad: a gradient of what is not of the batch is a sum over its samples."""
        given = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
        outputs, inputs = (tree_leaves(given[name]) for name in ("outputs", "inputs"))
        if any(_WRAPPED(x) for x in (*outputs, *inputs)):
            return torch.autograd.grad(*args, **kwargs)  # inside torch.func its operations say more
        if any(self.sharded(x) for x in inputs):
            raise UsageError(
                "torch.autograd.grad is asked for gradients by parameters that are sharded, which do not meet then",
                where="plan.shard",
                fix="loss.backward(); or dp in the place of shard",
                code="J29",
            )
        of = following.of
        losses = [trace for x in outputs if (trace := of(x)) is not None]
        with following.paused():
            found = torch.autograd.grad(*args, **kwargs)
        for x, gradient in zip(inputs, found, strict=False):
            if isinstance(gradient, Tensor) and losses:
                following.mark(gradient, self._of_gradient(of(x), losses[0]))
        return found

    def _of_gradient(self, by: SampleTrace | None, loss: SampleTrace) -> SampleTrace:
        """Of a gradient by something of which `by` is known."""
        if by is not None and by.dim is not None:
            return by
        return SampleTrace(loss.batch, loss.samples, dim=None, reduced="gradient", met=loss.met)


def _of_shards(func: Any, error: Exception) -> UsageError:
    name = getattr(func, "__name__", "an operation").removeprefix("_foreach_").strip("_")
    said = str(error).strip().split("\n")[0]
    return UsageError(
        f"torch's {name} cannot take parameters that are sharded: {said[:160]}",
        where="plan.shard",
        likely="weights that are read outside the model's forward, or an optimiser that treats a tensor as a whole",
        fix="dp in the place of shard; or compute it in the model's forward, where parameters are whole",
        code="J29",
    )

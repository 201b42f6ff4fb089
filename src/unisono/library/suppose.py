"""A search for the cause of wrong gradients by playing one device again, with one mistake in its forward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

Shape = tuple[int, ...]
Gradients = Mapping[str, Tensor]


class BiasTimes(TorchFunctionMode):
    """While it is on, the bias of each linear layer with weights of one shape counts a number of times.

    shape: of these weights; no layer's if None. with_gradient: whether its gradient does too. shapes: of the weights of
    all linear layers with a bias that were called.
    """

    def __init__(self, shape: Shape | None = None, times: int = 1, with_gradient: bool = False) -> None:
        super().__init__()
        self.shape, self.times, self.with_gradient = shape, times, with_gradient
        self.shapes: dict[Shape, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        if func is not linear or bound.get("bias") is None:
            return func(*args, **(kwargs or {}))
        shape = tuple(bound["weight"].shape)
        self.shapes[shape] = None
        if shape == self.shape:
            extra = (self.times - 1) * bound["bias"]
            bound["bias"] = bound["bias"] + (extra if self.with_gradient else extra.detach())
        return func(**bound)


def supposed(
    function: Callable[[], Gradients | Sequence[Gradients]], ranks: int, seed: Callable[[], None]
) -> Iterator[tuple[str, list[Gradients]]]:
    """Yield (what is supposed, the shares that one device makes then). seed: sets all generators back."""
    seed()
    with BiasTimes() as look:
        function()
    for shape in look.shapes:
        for with_gradient in (False, True):
            seed()
            with BiasTimes(shape, ranks, with_gradient):
                result = function()
            parts = list(result) if isinstance(result, Sequence) else [result]
            yield f"the bias of the linear layer with weights {list(shape)} counts {ranks} times", parts

"""Weights of which each tensor is put together when it is asked for."""

from collections.abc import Callable, Mapping

from torch import Tensor

from unisono.models.weights import Shape, Weights


class MadeWeights(Weights):
    """make: by name, a tensor's shape and what gives it. At most one that had to be put together is held."""

    def __init__(self, where: str, make: Mapping[str, tuple[Shape, Callable[[], Tensor]]]) -> None:
        self.where, self._make = where, make
        self.shapes = {name: shape for name, (shape, _) in make.items()}
        self._last: tuple[str, Tensor] | None = None

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._make[name][1]()
        whole = self._last[1]
        return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def held(where: str, tensors: Mapping[str, Tensor]) -> MadeWeights:
    """Tensors that are there."""
    return MadeWeights(where, {name: (tuple(x.shape), lambda x=x: x) for name, x in tensors.items()})

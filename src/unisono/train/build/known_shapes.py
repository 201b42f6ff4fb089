"""Operations on the meta device, each worked out once: micro-batches and blocks repeat the same ones.

What an operation on shapes returns depends on the shapes alone. torch works that out in Python, about half a
millisecond each time; a table of what came before answers in a tenth of it.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, strides and type of one tensor that an operation returns."""


class KnownShapes:
    """What operations returned, by operation and by what they were given. Operations that return views, or change what
    a tensor is a view of, are worked out each time."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[_Made, ...] | None] = {}  # None: each time
        self._pure: dict[Any, bool] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operation's answer."""
        if func not in self._pure:
            self._pure[func] = _is_pure(func)
        if not self._pure[func]:
            return func(*args, **kwargs)
        try:
            key = (func, _described(args), _described(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:  # a tensor with numbers, or something that is no key of a table
            return func(*args, **kwargs)
        if known:
            outputs = tuple(torch.empty_strided(*of[:2], dtype=of[2], device="meta") for of in known)
            return outputs if len(func._schema.returns) > 1 else outputs[0]
        out = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _as_made(out)
        return out


def _is_pure(func: Any) -> bool:
    """Whether an operation returns new tensors, and nothing else, and leaves those that it is given."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns or schema.name.startswith(("c10d::", "_c10d_functional::")):
        return False
    sides = (*schema.arguments, *schema.returns)
    return all(side.alias_info is None for side in sides) and all(
        isinstance(side.type, torch.TensorType) for side in schema.returns
    )


def _described(value: Any) -> Hashable:
    """A value as part of a key. Raises TypeError for tensors that have numbers."""
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.layout != torch.strided or type(value) not in _PLAIN:
            raise TypeError("not a shape")
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_described(part) for part in value)
    hash(value)
    return type(value), value


def _as_made(out: Any) -> tuple[_Made, ...] | None:
    """What is to be made the next time; None where a new tensor of that size and strides would be another one."""
    tensors = out if isinstance(out, tuple) else (out,)
    layouts: list[_Made] = []
    for x in tensors:
        if (
            type(x) is not Tensor
            or x.device.type != "meta"
            or x.layout != torch.strided
            or x.storage_offset()
        ):
            return None
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if like.untyped_storage().nbytes() != x.untyped_storage().nbytes():
            return None
        layouts.append((tuple(x.shape), x.stride(), x.dtype))
    return tuple(layouts)

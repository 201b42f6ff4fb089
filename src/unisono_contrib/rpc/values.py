"""Values of calls as JSON and raw tensors. Nothing that is read here can run code.

JSON holds None, booleans, numbers and texts as they are. Everything else is a list that begins with a letter:
["l", ...] a list, ["t", ...] a tuple, ["d", [key, value], ...] a dict, ["f", "nan"] a number that JSON lacks,
["b", ...] bytes, ["x", i] tensor number i, ["s", indices, values, shape] a sparse tensor, ["r", i] RRef number i.
"""

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.train.state.checkpoint.tensorfile import NAMES
from unisono_contrib.rpc.errors import not_sendable

_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value on its way. tree: its JSON. references: what tells of `rrefs`. sends: [index of a tensor, its number in a
    context of distributed autograd]."""

    tree: Any
    tensors: Sequence[Tensor]
    rrefs: Sequence[Any]
    references: Sequence[Any]
    sends: Sequence[Any]


def pack(
    value: Any, tensors: list[Tensor], rrefs: list[Any], is_rref: Callable[[Any], bool], depth: int = 0
) -> Any:
    """The JSON of a value. Its tensors and RRefs are appended to the two lists. Raises UsageError Q05."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if depth > _DEEPEST:
        raise not_sendable(f"values nested more than {_DEEPEST} deep do not travel")
    inner = lambda part: pack(part, tensors, rrefs, is_rref, depth + 1)
    match value:
        case Tensor():
            return _pack_tensor(value, tensors)
        case np.generic():
            return inner(value.item())
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else ["f", repr(value)]
        case bytes():
            return ["b", base64.b64encode(value).decode()]
        case tuple():
            return ["t", *map(inner, value)]
        case list():
            return ["l", *map(inner, value)]
        case dict():
            return ["d", *([inner(key), inner(item)] for key, item in value.items())]
    if is_rref(value):
        rrefs.append(value)
        return ["r", len(rrefs) - 1]
    kind = type(value)
    raise not_sendable(f"a value of type {kind.__module__}.{kind.__qualname__} does not travel")


def _pack_tensor(x: Tensor, tensors: list[Tensor]) -> Any:
    if x.layout == torch.sparse_coo:
        parts = x.detach().coalesce()
        index = len(tensors)
        tensors += [parts.indices(), parts.values()]
        return ["s", index, index + 1, list(x.shape)]
    if x.layout != torch.strided or x.dtype not in NAMES or x.is_meta:
        raise not_sendable(f"a tensor of {x.dtype}, {x.layout} on {x.device} does not travel")
    tensors.append(x)
    return ["x", len(tensors) - 1]


def unpack(tree: Any, tensors: Sequence[Tensor], rrefs: Sequence[Any]) -> Any:
    """The value of a JSON. Raises ValueError, IndexError, TypeError or KeyError for what `pack` did not write."""
    if not isinstance(tree, list):
        return tree
    inner = lambda part: unpack(part, tensors, rrefs)
    match tree:
        case ["x", int(index)]:
            return tensors[index]
        case ["r", int(index)]:
            return rrefs[index]
        case ["l", *parts]:
            return [inner(part) for part in parts]
        case ["t", *parts]:
            return tuple(inner(part) for part in parts)
        case ["d", *pairs]:
            return {inner(key): inner(item) for key, item in pairs}
        case ["f", str(text)]:
            return float(text)
        case ["b", str(text)]:
            return base64.b64decode(text, validate=True)
        case ["s", int(indices), int(values), list(shape)]:
            return torch.sparse_coo_tensor(
                tensors[indices], tensors[values], shape, is_coalesced=True, check_invariants=True
            )
    raise ValueError("a value in a form that nobody writes")

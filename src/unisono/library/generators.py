"""Generators of the script's own: where they are, and what state they are in.

They are looked for in what a script's functions and a data set hold: variables, attributes, containers, closures.
"""

import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.spec.frames import is_foreign

MOST = 4096  # things that are looked into
FEW = 32  # of a container's
_PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, np.ndarray, type, types.ModuleType)


@dataclass(frozen=True, slots=True)
class Own:
    """One generator. get, set: its state, set from a seed."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


def found_in(roots: Iterable[Any]) -> list[Own]:
    """Those that can be reached from these things."""
    todo, seen, found = list(roots), set(), []
    while todo and len(seen) < MOST:
        one = todo.pop(0)
        if id(one) in seen or isinstance(one, _PLAIN):
            continue
        seen.add(id(one))
        own = _own(one)
        if own is not None:
            found.append(own)
        else:
            todo += _inside(one)
    return found


def found_in_script() -> list[Own]:
    """Python's and NumPy's, of the functions of the script that are running in this thread. Torch's pass where they are
    used (`following`)."""
    frame, roots = sys._getframe(1), []
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            roots += [*frame.f_locals.values(), *(_named(frame))]
        frame = frame.f_back
    return [
        own for own in found_in(roots) if not isinstance(getattr(own.get, "__self__", None), torch.Generator)
    ]


def _named(frame: types.FrameType) -> Iterator[Any]:
    """Global values that the code of a frame names."""
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield frame.f_globals[name]


def _own(one: Any) -> Own | None:
    if isinstance(one, torch.Generator):
        return (
            Own(one.get_state, one.set_state, one.manual_seed) if one is not torch.default_generator else None
        )
    if isinstance(one, random.Random):
        shared = one is getattr(random, "_inst", None) or isinstance(one, random.SystemRandom)
        return None if shared else Own(one.getstate, one.setstate, one.seed)
    if isinstance(one, np.random.RandomState):
        shared = one is np.random.mtrand._rand
        return None if shared else _of_bits(one._bit_generator)
    return _of_bits(one.bit_generator) if isinstance(one, np.random.Generator) else None


def _of_bits(bits: Any) -> Own:
    """NumPy's: a seed gives the state that a new one of its kind has."""

    def put(state: Any) -> None:
        bits.state = state

    return Own(partial(getattr, bits, "state"), put, lambda seed: put(type(bits)(seed).state))


def _inside(one: Any) -> list[Any]:
    if isinstance(one, dict):
        return list(one.values())[:FEW]
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)[:FEW]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
        return [
            *cells,
            *(one.__defaults__ or ()),
            *(one.__globals__.get(name) for name in one.__code__.co_names),
        ]
    held = getattr(one, "__dict__", None)
    return list(held.values())[: 8 * FEW] if isinstance(held, dict) else []

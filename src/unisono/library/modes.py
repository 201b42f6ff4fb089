"""Torch's modes of this thread, put on and taken off from wherever they stand among the script's own.

A `with` block of the script's takes off whatever mode is on top when it ends. So ours lie at the bottom, above nothing
but the default device, which torch wants there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext


def place_function_mode(mode: Any, on: bool) -> bool:
    """Have a TorchFunctionMode on or off; whether it is on then."""
    return _placed(mode, on, _len_torch_function_stack, _pop_mode, _push_mode)


def place_dispatch_mode(mode: Any, on: bool) -> bool:
    """Have a TorchDispatchMode on or off; whether it is on then."""
    count: Callable[[], int] = dispatch._len_torch_dispatch_stack
    return _placed(mode, on, count, dispatch._pop_mode, dispatch._push_mode)


def _placed(
    mode: Any, on: bool, count: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], object]
) -> bool:
    """A mode that is being asked at this moment is not on the stack, and torch puts it back afterwards: it stays on."""
    every = [pop() for _ in range(count())][::-1]
    others = [other for other in every if other is not mode]
    devices = [other for other in others if isinstance(other, DeviceContext)]
    for other in (*devices, *([mode] if on else []), *(other for other in others if other not in devices)):
        push(other)
    return on or len(others) == len(every)


@contextmanager
def unwatched() -> Iterator[None]:
    """No dispatch mode sees what happens inside, and what is made there is nobody's. Also a decorator."""
    with dispatch._disable_current_modes():
        yield

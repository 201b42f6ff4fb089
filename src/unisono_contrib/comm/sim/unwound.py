"""Errors in the backward pass on the simulated device, which torch 2.13 would end with `std::terminate`.

When an operation or a hook raises on autograd's thread of a device, C++ unwinds with Python's error still pending, and
asks the device's guard, in a destructor, what kind it is. A guard in Python cannot answer then: so this one sets the
error aside, and whoever has called backward raises it.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

_KIND: Any = torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]
_aside: list[BaseException] = []
_call = ctypes.pythonapi.PyErr_Occurred  # a call by ctypes raises the error that is pending, if there is one


class UnwoundGuard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined,misc]
    """What torch asks of a kind of device in C++."""

    def type_(self) -> Any:
        try:
            _call()
        except BaseException as error:
            if torch._C._current_graph_task_id() == -1:
                raise
            _aside[:] = [error]
        return _KIND


def raise_what_backward_raised() -> None:
    """From now on, in this process. A second call changes nothing more."""
    if getattr(graph._engine_run_backward, "raises", False):
        return
    run: Callable[..., Any] = graph._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        _aside.clear()
        try:
            return run(*args, **kwargs)
        except SystemError:  # the error itself is missing
            if not _aside:
                raise
            raise _aside.pop() from None

    backward.raises = True  # type: ignore[attr-defined]
    graph._engine_run_backward = torch.autograd._engine_run_backward = backward

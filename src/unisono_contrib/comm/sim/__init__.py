"""A simulated device, `sim`: memory of its own and of a set size, streams that run ahead of the host, and collectives.

It computes on the CPU. What it is for is its order: an operation that reads what it has not waited for reads a value
that nobody can rely on, NaN, so a wait that is missing in a program is a wrong number and a `Race`, on a laptop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono_contrib.comm.sim.autocast import register_autocast
from unisono_contrib.comm.sim.copies import page_locked
from unisono_contrib.comm.sim.group import register
from unisono_contrib.comm.sim.module import SimModule
from unisono_contrib.comm.sim.order import Race
from unisono_contrib.comm.sim.tensor import NAME, SimDevice, SimTensor, device, run, set_up

__all__ = ["NAME", "DeviceTally", "SimDevice", "SimTensor", "install", "page_locked", "tally"]

@dataclass(frozen=True, slots=True)
class DeviceTally:
    """Since the device was installed. races: accesses that nothing orders. waits: how often the host waited, by line.
    launches: operations. copies: between host and device. most: bytes of its memory at the peak."""

    races: tuple[Race, ...]
    waits: Mapping[str, int]
    launches: int
    copies: int
    most: int


def tally() -> DeviceTally:
    """Of this process's device."""
    timeline, counts = device().timeline, device().timeline.counts
    return DeviceTally(
        tuple(timeline.races), dict(timeline.waits), counts["launch"], counts["copy_in"] + counts["copy_out"],
        device().memory.most,
    )  # fmt: skip


_library: list[Any] = []


def install(limit: int = 1 << 40) -> SimDevice:
    """Give this process a device of `limit` bytes. A second call empties it."""
    if not _library:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, SimModule())
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
        # torch.tensor(..., device=) leaves out what Python dispatches to, and torch 2.13 finds no fallback from there.
        aten = torch.library.Library("aten", "IMPL")
        for name in ("copy_", "lift_fresh"):
            func = getattr(torch.ops.aten, name).default
            aten.impl(name, lambda *args, func=func, **kwargs: run(func, args, kwargs), "PrivateUse1")
        _library.extend((library, aten, *register_autocast(NAME)))
        resize: Any = torch.UntypedStorage.resize_

        def resized(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            device().resized(storage, nbytes)
            return result

        register()
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
    return set_up(limit)

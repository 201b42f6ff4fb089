"""A simulated device, `sim`: memory of its own and of a set size, streams that run ahead of the host, and collectives.

It computes on the CPU. What it is for is its order: an operation that reads what it has not waited for reads a value
that nobody can rely on, NaN, so a wait that is missing in a program is a wrong number and a `Race`, on a laptop.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.spec import words
from unisono_contrib.comm.sim.attention import ATTENTION, attend
from unisono_contrib.comm.sim.autocast import register_autocast
from unisono_contrib.comm.sim.copies import SPECIAL, page_locked
from unisono_contrib.comm.sim.group import register
from unisono_contrib.comm.sim.module import SimModule
from unisono_contrib.comm.sim.order import Race
from unisono_contrib.comm.sim.tensor import NAME, SimDevice, SimTensor, device, run, set_up
from unisono_contrib.comm.sim.unwound import UnwoundGuard, raise_what_backward_raised

__all__ = ["NAME", "DeviceTally", "SimDevice", "SimTensor", "install", "page_locked", "tally"]


@dataclass(frozen=True, slots=True)
class DeviceTally:
    """Since the device was installed. races: accesses that nothing orders. waits: how often the host waited, by line.
    launches: operations. copies: between host and device. most: bytes at the peak of its memory, of `limit`."""

    races: tuple[Race, ...]
    waits: Mapping[str, int]
    launches: int
    copies: int
    most: int
    limit: int

    def says(self) -> list[str]:
        """In words, for the end of a run."""
        waited, peak = sum(self.waits.values()), words.nbytes(self.most)
        first = f"{len(self.races)} races, the first: {self.races[0]}" if self.races else "no race"
        return [
            f"simulated device: {first}; {self.launches:,} operations, {self.copies:,} copies, {waited:,} host waits,"
            f" {peak} at the peak"
        ]


def tally() -> DeviceTally:
    """Of this process's device."""
    timeline, counts = device().timeline, device().timeline.counts
    return DeviceTally(
        tuple(timeline.races), dict(timeline.waits), counts["launch"], counts["copy"],
        device().memory.most, device().memory.limit,
    )  # fmt: skip


_library: list[Any] = []
_MEMORY = re.compile(NAME + r":memory=(\d+)([MG])iB")
_UNBOUND = 1 << 50  # bytes


def install(backend: str = NAME) -> SimDevice:
    """Give this process a device. A second call empties it. backend: `sim`, or `sim:memory=64MiB`, as
    `launch.backend` says it. Raises RuntimeError where this torch has no devices in Python."""
    if not _library:
        try:
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
        except ImportError as error:
            raise RuntimeError(
                f"torch {torch.__version__} has no devices in Python; 2.13 has them"
            ) from error
        _setup_privateuseone_for_python_backend(NAME, SimModule(), device_guard=UnwoundGuard())
        raise_what_backward_raised()
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
        # torch.tensor(..., device=) leaves out what Python dispatches to, and torch 2.13 finds no fallback from there.
        aten = torch.library.Library("aten", "IMPL")
        for name in ("copy_", "lift_fresh"):
            func = getattr(torch.ops.aten, name).default
            aten.impl(name, lambda *args, func=func, **kwargs: run(func, args, kwargs), "PrivateUse1")
        aten.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
        _library.extend((library, aten, *register_autocast(NAME)))
        resize: Any = torch.UntypedStorage.resize_

        def resized(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            device().resized(storage, nbytes)
            return result

        register()
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
    size = _MEMORY.fullmatch(backend)
    return set_up(int(size[1]) << {"M": 20, "G": 30}[size[2]] if size else _UNBOUND, {**SPECIAL, **ATTENTION})

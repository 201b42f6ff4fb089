"""Copies between the host and the simulated device, and other operations that need care.

A copy to page-locked memory arrives when the host waits for it, not before. A copy from page-locked memory takes what
stands there until then: what the host writes there meanwhile makes the copy wrong.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.comm.sim.order import Access, DeviceBuffer, Race, SimStream, site
from unisono_contrib.comm.sim.tensor import (
    NAME,
    SimTensor,
    Special,
    all_of,
    device,
    launch,
    overwrite,
    poison,
    span_of,
)

_aten: Any = torch.ops.aten


class _Page(bytearray):
    """Page-locked bytes of the host. buffer: who reads and writes them on the device's streams. late: copies to it that
    have not arrived. checks: whether the host has changed what is copied from it."""

    buffer: DeviceBuffer
    late: "list[tuple[Access, Callable[[], None]]]"
    checks: "list[Callable[[], None]]"


_pages: "weakref.WeakValueDictionary[int, _Page]" = weakref.WeakValueDictionary()


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory that the device copies to and from on its own."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    page = _Page(nbytes)
    here = device()
    page.buffer = DeviceBuffer(here.timeline, here.default, nbytes, lambda nbytes: None)
    page.buffer.keepers = _Everybody()  # memory of the host waits for whoever uses it
    page.late, page.checks = [], []
    there = torch.frombuffer(page, dtype=dtype).view(torch.Size(shape))
    _pages[there.untyped_storage().data_ptr()] = page
    return there


class _Everybody(set[int]):
    def __contains__(self, item: object) -> bool:
        return True


def page_of(x: Tensor) -> "_Page | None":
    """The page that a tensor of the host lies in; None where it is not page-locked."""
    return _pages.get(x.untyped_storage().data_ptr())


def _copy_(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    to, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if isinstance(to, SimTensor) and isinstance(source, SimTensor):
        return launch(func, args, kwargs)
    if isinstance(to, SimTensor):
        _in(to, source, non_blocking)
    else:
        _out(to, source, non_blocking)
    return to


def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    (source,), where = args, kwargs.get("device")
    kind = None if where is None else torch.device(where).type
    from_device = isinstance(source, SimTensor)
    to_device = kind == NAME or (from_device and kind is None)
    how = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    if from_device and to_device:
        return launch(func, args, {**how, "device": torch.device("cpu")})
    if kind == "meta":
        return func(source.numbers, **how, device=where)
    like = func(source.numbers if from_device else source, **how, device="meta")
    numbers = torch.empty_like(like, device="cpu")
    non_blocking = bool(kwargs.get("non_blocking", False))
    if to_device:
        there = SimTensor(numbers)
        _in(there, source, non_blocking)
        return there
    out = page_locked(like.shape, like.dtype) if non_blocking else numbers
    _out(out, source, non_blocking)
    return out


def _in(to: SimTensor, source: Tensor, non_blocking: bool) -> None:
    """From the host to the device."""
    page, timeline, spoils = page_of(source), device().timeline, list[Callable[[], None]]()
    with timeline.lock:
        stream, access = _begun("to the device", all_of(spoils))
        value = source
        if page is not None:
            _arrive(page, stream)
            if not page.buffer.read(access, span_of(source), stream.clock):
                value = poison(source)
        to.numbers.copy_(value)
        overwrite(to, access, stream, spoils)
        if page is not None and non_blocking:
            check = _once(_unchanged(source, source.clone(), access))
            page.checks.append(check)
            timeline.late.append((stream.number, access.tick, check))
            return
    if not non_blocking:
        timeline.wait_on_host({stream.number: access.tick})


def _begun(where: str, spoil: Callable[[], None]) -> tuple[SimStream, Access]:
    """The current stream, and a copy that it makes next."""
    here = device()
    here.timeline.counts["copy"] += 1
    return here.stream, Access(here.stream.number, here.stream.begin(), f"a copy {where} at {site()}", spoil)


def _unchanged(source: Tensor, then: Tensor, access: Access) -> Callable[[], None]:
    def check() -> None:
        if not torch.equal(_bits(source), _bits(then)):
            device().timeline.races.append(Race("changed while it was copied", access.what, "the host"))
            access.spoil()

    return check


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    calls = [call]

    def first() -> None:
        if calls:
            calls.pop()()

    return first


def _out(to: Tensor, source: SimTensor, non_blocking: bool) -> None:
    """From the device to the host."""
    here, page, wrong = device(), page_of(to), list[bool]()
    timeline = here.timeline
    with timeline.lock:
        stream, access = _begun("to the host", lambda: wrong.append(True))
        safe = source.buffer.read(access, span_of(source.numbers), stream.clock) and not here.is_lost
        value = source.numbers.clone() if safe else poison(source.numbers)
        if page is None or not non_blocking:
            to.copy_(value)
        else:
            page.buffer.overwrite(access, span_of(to), stream.clock)
            for check in page.checks:
                check()
            page.checks = []
            _arrive(page, stream)
            to.copy_(poison(to))
            arrive = _once(lambda: _write(to, poison(value) if wrong else value))
            page.late.append((access, arrive))
            timeline.late.append((stream.number, access.tick, arrive))
            return
    timeline.wait_on_host({stream.number: access.tick})


def _write(to: Tensor, value: Tensor) -> None:
    to.copy_(value)


def _arrive(page: _Page, stream: SimStream) -> None:
    """What this stream has waited for lies in the page."""
    for access, arrive in page.late:
        if access.known_to(stream.clock):
            arrive()
    page.late = [each for each in page.late if not each[0].known_to(stream.clock)]


def _set_(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Another storage, or another size: the wrapper has to say so too."""
    to = args[0]
    numbers = to.numbers.detach()
    func(numbers, *(a.numbers if isinstance(a, SimTensor) else a for a in args[1:]), **kwargs)
    to.data = SimTensor(numbers)
    return to


def _nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    return None


def _not_pinned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return False


SPECIAL: dict[Any, Special] = {
    _aten.copy_.default: _copy_,
    _aten._to_copy.default: _to_copy,
    _aten.set_.source_Storage: _set_,
    _aten.set_.source_Storage_storage_offset: _set_,
    _aten.set_.source_Tensor: _set_,
    _aten.resize_.default: _set_,
    _aten.record_stream.default: _nothing,
    _aten.is_pinned.default: _not_pinned,
}
"""Operations with care of their own."""

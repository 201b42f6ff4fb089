"""Tensors of the simulated device, and its operations: each is computed on the CPU at once, and read or written in the
order in which a real device might have: what was not waited for has no value that anybody can rely on.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from unisono_contrib.comm.sim.memory import DeviceMemory
from unisono_contrib.comm.sim.order import Access, DeviceBuffer, SimStream, Span, StreamTimeline, site

NAME = "sim"
Special = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # (operation, arguments) -> result
_aten: Any = torch.ops.aten


class SimDevice:
    """One device: its streams, memory and buffers, and which stream each thread stands on.

    buffers: by the address of the storage that holds a buffer's numbers. special: operations that `launch` does not
    fit, such as copies from the host.
    """

    def __init__(self, limit: int, special: Mapping[Any, Special]) -> None:
        self.special = special
        self.timeline, self.memory = StreamTimeline(), DeviceMemory(limit)
        self.buffers: weakref.WeakValueDictionary[int, DeviceBuffer] = weakref.WeakValueDictionary()
        self.default = self.timeline.stream()
        self.place = torch.device(NAME, 0)
        self.is_lost = False
        self._here = threading.local()

    def lose(self) -> None:
        """What another device has received may be wrong: no number of this one counts any more."""
        self.is_lost = True

    @property
    def stream(self) -> SimStream:
        """On which this thread's operations run."""
        return getattr(self._here, "stream", self.default)

    @stream.setter
    def stream(self, stream: SimStream) -> None:
        self._here.stream = stream

    def buffer(self, numbers: Tensor) -> DeviceBuffer:
        """The buffer that holds these numbers; a new one for a storage that is new. Raises torch.OutOfMemoryError."""
        storage = numbers.untyped_storage()
        known = self.buffers.get(storage._cdata)
        if known is None:
            try:
                self.memory.take(storage.nbytes())
            except MemoryError as error:
                raise torch.OutOfMemoryError(f"{NAME} out of memory: {error}") from None
            self.stream.take()
            known = DeviceBuffer(self.timeline, self.stream, storage.nbytes(), self.memory.give_back)
            self.buffers[storage._cdata] = known
        return known

    def resized(self, storage: Any, nbytes: int) -> None:
        """A storage has another size."""
        if (known := self.buffers.get(storage._cdata)) is not None:
            self.memory.give_back(known.nbytes)
            known.nbytes = 0
            self.memory.take(nbytes)
            known.nbytes = nbytes
            known.spoil((0, nbytes))


_devices: list[SimDevice] = []


def device() -> SimDevice:
    """The device of this process."""
    return _devices[0]


def set_up(limit: int, special: Mapping[Any, Special]) -> SimDevice:
    """Begin with an empty device of so many bytes."""
    _devices[:] = [SimDevice(limit, special)]
    return _devices[0]


class SimTensor(Tensor):
    """A tensor whose numbers lie in `numbers`, a tensor on the CPU that nobody else sees."""

    numbers: Tensor
    buffer: DeviceBuffer

    @staticmethod
    def __new__(cls, numbers: Tensor, requires_grad: bool = False) -> "SimTensor":
        self = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device().place,
            requires_grad=requires_grad,
        )
        self.numbers, self.buffer = numbers, device().buffer(numbers)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.buffer.keepers.add(stream.sim.number)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def __repr__(self, **_: Any) -> str:
        return f"{self.numbers!r:.1000} on {NAME}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]  # with a version of its own

    @data.setter
    def data(self, value: "SimTensor") -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.numbers, self.buffer = value.numbers, value.buffer


@dataclass(frozen=True, slots=True)
class _Signature:
    """written: (place, keyword) of arguments that are written. unread: they are not read. is_view: its
    result is memory of an argument, and nothing is read. is_empty: its result has no values yet."""

    written: tuple[tuple[int, str], ...]
    unread: bool
    is_view: bool
    is_empty: bool


_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")


@cache
def _signature(func: Any) -> _Signature:
    schema = func._schema
    marked = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    written = tuple((i, a.name) for i, a in marked if a.alias_info.is_write)
    name = schema.name.partition("::")[2]
    unread = name in _OVERWRITES or name.startswith("_foreach_copy_") or all(
        schema.arguments[i].is_out for i, _ in written
    )  # fmt: skip
    is_view = bool(marked) and not written
    return _Signature(written, unread, is_view, name.startswith(("empty", "new_empty", "_empty")))


# Operations of which the host needs the result, and so waits for it.
_WAITED_FOR = frozenset(
    {
        _aten._local_scalar_dense.default,
        _aten.equal.default,
        _aten.is_nonzero.default,
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
        _aten.bincount.default,
        _aten.repeat_interleave.Tensor,
    }
)


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute one operation on the current stream."""
    if (special := device().special.get(func)) is not None:
        return special(func, args, kwargs)
    return launch(func, args, kwargs)


def launch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As `run`, of what needs no care of its own."""
    here, how = device(), _signature(func)
    with here.timeline.lock:
        stream = here.stream
        tick = stream.begin()
        here.timeline.counts["launch"] += 1
        spoils: list[Callable[[], None]] = []
        access = Access(stream.number, tick, f"{func} at {site()}", all_of(spoils))
        written = _written(how, args, kwargs)
        wrong = False

        def read(x: Any) -> Any:
            nonlocal wrong
            if isinstance(x, torch.device):
                return torch.device("cpu") if x.type == NAME else x
            if not isinstance(x, SimTensor):
                return x
            is_written = any(x is w for w in written)
            if how.is_view or (how.unread and is_written):
                return x.numbers
            if x.buffer.read(access, span_of(x.numbers), stream.clock) and not here.is_lost:
                return x.numbers
            wrong |= is_written
            return x.numbers if is_written else poison(x.numbers)

        result = func(*tree_map(read, tuple(args)), **tree_map(read, kwargs))
        for x in written:
            _fit(x)
        outputs = _wrapped(result, {id(w.numbers): w for w in written})
        for x in written if how.is_view else {id(x): x for x in (*written, *tensors(outputs))}.values():
            overwrite(x, access, stream, spoils)
            if wrong and any(x is w for w in written):
                x.buffer.spoil(span_of(x.numbers))
        if how.is_empty:
            for x in tensors(outputs):
                x.numbers.copy_(poison(x.numbers))
    if func in _WAITED_FOR:
        here.timeline.wait_on_host({stream.number: tick})
    return outputs


def overwrite(x: SimTensor, access: Access, stream: SimStream, spoils: list[Callable[[], None]]) -> None:
    """Note that an operation writes x. spoils: gets what makes x wrong."""
    span, there = span_of(x.numbers), weakref.ref(x.buffer)
    x.buffer.overwrite(access, span, stream.clock)

    def spoil() -> None:
        if (known := there()) is not None:
            known.spoil(span)

    spoils.append(spoil)


def all_of(calls: list[Callable[[], None]]) -> Callable[[], None]:
    """Call them all, those too that come to the list later."""

    def call() -> None:
        for each in calls:
            each()

    return call


def span_of(numbers: Tensor) -> Span:
    """The bytes of its storage that a tensor reaches."""
    first = int(numbers.storage_offset()) * numbers.itemsize
    if not numbers.numel():
        return first, first
    last = sum(
        int(size - 1) * int(stride) for size, stride in zip(numbers.shape, numbers.stride(), strict=True)
    )
    return first, first + (last + 1) * numbers.itemsize


def _fit(x: SimTensor) -> None:
    """An operation may have given its output another size."""
    if x.shape != x.numbers.shape:
        storage = x.numbers.untyped_storage()
        if storage.nbytes() != x.buffer.nbytes:
            device().resized(storage, storage.nbytes())
        x.data = SimTensor(x.numbers)


def poison(numbers: Tensor) -> Tensor:
    """What is read where nothing is certain: NaN, and of integers the bits the other way round."""
    if numbers.is_floating_point() or numbers.is_complex():
        return torch.full_like(numbers, float("nan"))
    return ~numbers


def _written(how: _Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SimTensor]:
    values = (args[i] if i < len(args) else kwargs.get(name) for i, name in how.written)
    return [x for value in values for x in tensors(value)]


def tensors(value: Any) -> list[SimTensor]:
    """The tensors of the device in arguments or results."""
    if isinstance(value, SimTensor):
        return [value]
    return [x for each in value for x in tensors(each)] if isinstance(value, tuple | list) else []


def _wrapped(result: Any, known: dict[int, SimTensor]) -> Any:
    if isinstance(result, Tensor):
        if isinstance(result, SimTensor):
            return result
        return known[id(result)] if id(result) in known else SimTensor(result)
    if isinstance(result, tuple | list):
        return type(result)(_wrapped(each, known) for each in result)
    return result

"""What torch and the house ask of a kind of device, as `torch.cuda` has it: streams, events, memory, `torch.sim`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono_contrib.comm.sim.order import Clock, SimStream, joined
from unisono_contrib.comm.sim.tensor import device


class Stream:
    """A stream of the device, as `torch.cuda.Stream`."""

    def __init__(self, place: Any = None, priority: int = 0, *, sim: SimStream | None = None) -> None:
        self.sim = device().timeline.stream() if sim is None else sim
        self.device = device().place
        self.stream_id, self.device_index, self.device_type = self.sim.number, 0, 20

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.sim is self.sim

    def __hash__(self) -> int:
        return self.sim.number

    def record_event(self, event: "SimEvent | None" = None) -> "SimEvent":
        event = event or SimEvent()
        event.record(self)
        return event

    def wait_event(self, event: "SimEvent") -> None:
        joined(self.sim.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        joined(self.sim.clock, other.sim.clock)

    def synchronize(self) -> None:
        device().timeline.wait_on_host({self.sim.number: self.sim.clock[self.sim.number], **self.sim.clock})

    def query(self) -> bool:
        return all(device().timeline.host.get(s, 0) >= t for s, t in self.sim.clock.items())

    def __enter__(self) -> "Stream":
        self._before = device().stream
        device().stream = self.sim
        return self

    def __exit__(self, *_: object) -> None:
        device().stream = self._before


class SimEvent:
    """A moment of a stream, as `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.clock: Clock = {}
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self._at = dict((stream or current_stream()).sim.clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        device().timeline.wait_on_host(self.clock)

    def query(self) -> bool:
        """Whether it is over: who asks once is still too early."""
        over = all(device().timeline.host.get(s, 0) >= t for s, t in self.clock.items())
        if not over:
            device().timeline.wait_on_host(self.clock, counted=False)
        return over

    def elapsed_time(self, end: "SimEvent") -> float:
        """Milliseconds. Raises RuntimeError, as CUDA does, where a moment is not recorded or not waited for."""
        over = all(device().timeline.host.get(s, 0) >= t for s, t in end.clock.items())
        if not (self._at and end._at and over):
            raise RuntimeError("the device has not come to the end of what is timed")
        return 1000 * (end._at - self._at)


def current_stream(place: Any = None) -> Stream:
    return Stream(sim=device().stream)


def default_stream(place: Any = None) -> Stream:
    return Stream(sim=device().default)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    with chosen:
        yield


class SimModule:
    """`torch.sim`."""

    Stream, Event = Stream, SimEvent
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    stream = staticmethod(stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, place: Any) -> None: ...

    def set_stream(self, chosen: Any) -> None:
        device().stream = chosen.sim

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def synchronize(self, place: Any = None) -> None:
        device().timeline.wait_on_host(device().timeline.everything())

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, place: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Any, place: Any = None) -> None: ...

    def memory_allocated(self, place: Any = None) -> int:
        return device().memory.taken

    def max_memory_allocated(self, place: Any = None) -> int:
        return device().memory.most

    def memory_reserved(self, place: Any = None) -> int:
        return device().memory.reserved

    def reset_peak_memory_stats(self, place: Any = None) -> None:
        device().memory.most = device().memory.taken

    def empty_cache(self) -> None:
        device().memory.drop_free()

    def mem_get_info(self, place: Any = None) -> tuple[int, int]:
        return device().memory.limit - device().memory.taken, device().memory.limit

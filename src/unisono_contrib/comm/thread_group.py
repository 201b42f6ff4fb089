"""The process group and the store of a world on threads (see comm.threads): ranks hand each other their tensors.

Nothing is computed or copied before all that it takes is there. The rank that comes last does it for all, unseen by
what counts its own operations.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Wait = Callable[[Callable[[], bool], str], None]  # (whether it is there, what is waited for)


class Handed(dist.Work):
    """An operation under way. wait: see comm.threads."""

    def __init__(self, name: str, out: Sequence[Tensor], wait: Wait) -> None:
        super().__init__()
        self.name, self.out, self.done, self._wait = name, out, False, wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the operation is over."""
        self._wait(lambda: self.done, self.name)
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Of the output tensors; for torch's DDP, which would wait where other ranks cannot run: so it is over."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self.out))
        return future


@dataclass(slots=True)
class ThreadCall:
    """One collective of a group, while its members come. what: its name and sizes, the same on every member.
    parts: each member's input and output tensors."""

    what: str
    parts: dict[int, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    works: list[Handed] = field(default_factory=list)


@dataclass(slots=True)
class Room:
    """Where the members of one group meet. ranks: global, in order. calls: by how many came before.
    letters: messages whose other half has not come, by (from, to, tag)."""

    ranks: tuple[int, ...]
    calls: dict[int, ThreadCall] = field(default_factory=dict)
    letters: dict[tuple[int, int, int], deque[tuple[str, Tensor, Handed]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


Finish = Callable[[list[list[Tensor]], list[list[Tensor]]], None]  # (inputs, outputs of every member)


class ThreadGroup(dist.ProcessGroup):
    """A group as one of its members sees it. The operations are torch's. Their sums take one rank after
    the other: a backend's own order, which is not that of `comm.tree`."""

    def __init__(self, name: str, index: int, room: Room, wait: Wait) -> None:
        super().__init__(index, len(room.ranks))  # type: ignore[call-arg]
        self._name, self._index, self._room, self._wait, self._calls = name, index, room, wait, 0

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handed:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._meet(f"allreduce {_op_name(op)}", tensors, tensors, partial(_reduce, op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handed:
        name = f"broadcast from {opts.rootRank}"
        return self._meet(name, tensors, tensors, lambda inputs, out: _spread(inputs[opts.rootRank], out))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Handed:
        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            for x, mine in zip(inputs[opts.rootRank], out, strict=True):
                _spread([x], [mine])

        return self._meet("scatter", inputs[0] if inputs else [], outputs, finish, alike=False)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Handed:
        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            out[opts.rootRank][0].copy_(_reduced([x for (x,) in inputs], opts.reduceOp))

        return self._meet(f"reduce {_op_name(opts.reduceOp)} to {opts.rootRank}", tensors, tensors, finish)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Handed:
        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            _spread([x for (x,) in inputs], [out[opts.rootRank]])

        return self._meet(
            f"gather to {opts.rootRank}", inputs, outputs[0] if outputs else [], finish, alike=False
        )

    def barrier(self, opts: Any = None) -> Handed:
        return self._meet("barrier", [], [], lambda inputs, out: None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handed:
        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            _spread([x for (x,) in inputs], out)

        return self._meet("allgather", inputs, outputs[0], finish)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handed:
        return self.allgather([list(output.view(-1).chunk(self.size()))], [input.view(-1)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Handed:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        parts = list(input.view(-1).chunk(self.size()))

        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            for i, (mine,) in enumerate(out):
                mine.copy_(_reduced([other[i] for other in inputs], op))

        return self._meet(f"reduce_scatter {_op_name(op)}", parts, [output.view(-1)], finish)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Handed:
        return [self.all_gather_single(out, x) for out, x in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Handed:
        return [self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)][-1]

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Handed:
        parts, slots = (
            list(x.split(sizes) if sizes else x.chunk(self.size()))
            for x, sizes in ((input, input_sizes), (output, output_sizes))
        )

        def finish(inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
            for i, mine in enumerate(out):
                _spread([other[i] for other in inputs], [mine])

        return self._meet("all_to_all", parts, slots, finish, alike=not (output_sizes or input_sizes))

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Handed:
        return self._letter("send", tensors[0], self._index, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Handed:
        return self._letter("recv", tensors[0], source, self._index, tag)

    def getBackendName(self) -> str:
        return "threads"

    def getGroupName(self) -> str:
        return self._name

    def _meet(
        self, name: str, inputs: Sequence[Tensor], out: Sequence[Tensor], finish: Finish, alike: bool = True
    ) -> Handed:
        """This member's part of the next collective. alike: whether all members' inputs have the same sizes."""
        number, self._calls = self._calls, self._calls + 1
        what = " ".join([name, *(f"{x.dtype} {list(x.shape)}" for x in inputs if alike)])
        call = self._room.calls.setdefault(number, ThreadCall(what))
        if call.what != what:
            first = self._room.ranks[next(iter(call.parts))]
            me = self._room.ranks[self._index]
            raise RuntimeError(f"rank {me} calls {what} where rank {first} calls {call.what}")
        work = Handed(f"{what} of ranks {list(self._room.ranks)}", out, self._wait)
        call.parts[self._index] = (list(inputs), list(out))
        call.works.append(work)
        if len(call.parts) == self.size():
            both = [call.parts[i] for i in range(self.size())]
            with torch.no_grad(), _disable_current_modes():
                finish([mine for mine, _ in both], [mine for _, mine in both])
            for each in call.works:
                each.done = True
            del self._room.calls[number]
        return work

    def _letter(self, half: str, x: Tensor, source: int, to: int, tag: int) -> Handed:
        """One half of a message; it is delivered when both are there. Messages keep their order."""
        end = f"to rank {self._room.ranks[to]}" if half == "send" else f"from rank {self._room.ranks[source]}"
        work = Handed(f"{half} {end} of {x.dtype} {list(x.shape)}", [x], self._wait)
        waiting = self._room.letters[source, to, tag]
        if not waiting or waiting[0][0] == half:
            waiting.append((half, x, work))
            return work
        _, y, theirs = waiting.popleft()
        if (x.dtype, x.numel()) != (y.dtype, y.numel()):
            raise RuntimeError(f"{work.name} meets {y.dtype} {list(y.shape)}")
        into, what = (y, x) if half == "send" else (x, y)
        with torch.no_grad(), _disable_current_modes():
            into.copy_(what.view_as(into))
        work.done = theirs.done = True
        return work


def _spread(values: Sequence[Tensor], out: Sequence[Sequence[Tensor]]) -> None:
    for mine in out:
        for x, value in zip(mine, values, strict=True):
            if x is not value:
                x.copy_(value.view_as(x))


def _reduce(op: Any, inputs: list[list[Tensor]], out: list[list[Tensor]]) -> None:
    _spread([_reduced(parts, op) for parts in zip(*inputs, strict=True)], out)


def _reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    """One tensor of those of all ranks, in an order fixed by their number."""
    name = _op_name(op)
    if name not in _REDUCED:
        raise RuntimeError(f"a world on threads cannot reduce by {name}")
    return _REDUCED[name](parts)


_REDUCED: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "SUM": partial(reduce, torch.add),
    "AVG": lambda parts: reduce(torch.add, parts) / len(parts),
    "PRODUCT": partial(reduce, torch.mul),
    "MAX": lambda parts: torch.stack(tuple(parts)).amax(0),
    "MIN": lambda parts: torch.stack(tuple(parts)).amin(0),
}


def _op_name(op: Any) -> str:
    """ "SUM" of ReduceOp.SUM, which torch gives in two types."""
    return next((name for name in _REDUCED if op == getattr(dist.ReduceOp, name)), str(op))


class ThreadStore(dist.Store):
    """Keys and values that all ranks see; semantics of torch's TCPStore."""

    def __init__(self, wait: Wait) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._wait, self._limit = wait, timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def clone(self) -> "ThreadStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(lambda: self.check(keys), f"the store's {', '.join(keys)}")

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        if self._values.get(key, b"") == _bytes(expected_value):
            self._values[key] = _bytes(desired_value)
        return self._values.get(key, _bytes(expected_value))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

"""Process groups of simulated devices: Gloo moves the bytes, and each group has a stream of its own, as NCCL's have.

An operation begins after what the calling stream has asked for so far. `wait` lets the calling stream wait for it, and
not the host.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono_contrib.comm.sim.copies import all_of
from unisono_contrib.comm.sim.order import Access, SimStream, joined, site
from unisono_contrib.comm.sim.tensor import SimTensor, device, overwrite, poison, span_of

BACKEND = "simccl"


class SimWork(dist.Work):
    """An operation under way on the group's stream. clock: what is known once it is over. held: its tensors, whose
    memory nobody takes until somebody waits, or forgets about it."""

    def __init__(self, work: Any, clock: dict[int, int], held: list[Tensor]) -> None:
        super().__init__()
        self._work, self._clock, self._held = work, clock, held

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait."""
        self._work.wait(timeout) if timeout is not None else self._work.wait()
        joined(device().stream.clock, self._clock)
        self._held = []
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        """For torch's DDP, which asks for it: waits at once."""
        future, held = torch.futures.Future(), self._held  # type: ignore[var-annotated]
        self.wait()
        future.set_result(held[-1:])
        return future

    def synchronize(self) -> None:
        self.wait()


class SimGroup(dist.ProcessGroup):
    """A group of ranks. Tensors of the host go to Gloo as they are."""

    def __init__(self, gloo: Any, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo, self._name = gloo, name
        self._stream: SimStream = device().timeline.stream()

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def _call(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], begin: Callable[..., Any]
    ) -> Any:
        """begin(*reads, *writes): Gloo's operation, of tensors of the host."""
        if not any(isinstance(x, SimTensor) for x in (*reads, *writes)):
            return begin(*reads, *writes)
        here, stream = device(), self._stream
        with here.timeline.lock:
            joined(stream.clock, here.stream.clock)
            tick = stream.begin()
            here.timeline.counts["collective"] += 1
            spoils: list[Callable[[], None]] = []
            access = Access(
                stream.number, tick, f"{what} at {site()}", all_of(spoils) if writes else here.lose
            )
            raw: list[Tensor] = []
            for x in reads:
                safe = not isinstance(x, SimTensor) or x.buffer.read(access, span_of(x.numbers), stream.clock)
                numbers = x.numbers if isinstance(x, SimTensor) else x
                if not safe and any(x is w for w in writes):
                    numbers.copy_(poison(numbers))
                raw.append(numbers if safe or any(x is w for w in writes) else poison(numbers))
            for x in writes:
                if isinstance(x, SimTensor):
                    overwrite(x, access, stream, spoils)
                raw.append(x.numbers if isinstance(x, SimTensor) else x)
            clock = dict(stream.clock)
        return SimWork(begin(*raw), clock, [*reads, *writes])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (x,) = tensors
        return self._call("all_reduce", [x], [x], lambda _, x: self._gloo.allreduce([x], opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        root = opts.rootRank == self.rank()
        return self._call(
            "broadcast", [x] if root else [], [] if root else [x], lambda x: self._gloo.broadcast([x], opts)
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        return self._call("reduce", [x], [x], lambda _, x: self._gloo.reduce([x], opts))

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._call("all_gather", [input], [output], lambda i, o: self._gloo._allgather_base(o, i))

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._call(
            "all_gather", inputs, outputs[0], lambda i, *o: self._gloo.allgather([list(o)], [i])
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._call(
            "reduce_scatter", [input], [output], lambda i, o: self._gloo._reduce_scatter_base(o, i, options)
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        return self._call(
            "all_to_all",
            [input],
            [output],
            lambda i, o: self._gloo.alltoall_base(o, i, output_sizes, input_sizes, dist.AllToAllOptions()),
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        parts = inputs[0] if inputs else []
        return self._call(
            "scatter",
            parts,
            outputs,
            lambda *x: self._gloo.scatter([x[-1]], [list(x[:-1])] if parts else [], opts),
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        parts = outputs[0] if outputs else []
        return self._call(
            "gather", inputs, parts, lambda i, *o: self._gloo.gather([list(o)] if parts else [], [i], opts)
        )

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._call("a send", tensors, [], lambda x: self._gloo.send([x], to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._call("a receive", [], tensors, lambda x: self._gloo.recv([x], source, tag))

    def _get_sequence_number_for_group(self) -> int:
        return self._gloo._get_sequence_number_for_group()


def register() -> None:
    """Let torch.distributed make groups of simulated devices."""

    def new_group(options: Any, _: Any) -> SimGroup:
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        return SimGroup(gloo, options.group_id, options.group_rank, options.group_size)

    dist.Backend.register_backend(BACKEND, new_group, extended_api=True, devices=["cpu", "sim"])

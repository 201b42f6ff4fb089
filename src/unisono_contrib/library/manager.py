"""A loop written against torchft's `Manager` and optimiser wrapper, over our supervisor and its meetings.

def train(context, argument, shared):                            an entry of `ForkServer("mine:train")`
    manager = Manager(context, load_state_dict, state_dict)
    optimizer = ManagedOptimizer(manager, torch.optim.AdamW(model.parameters()))
    while manager.current_step() < 100:
        optimizer.zero_grad()                                    a quorum; a new worker gets its state here
        loss(model).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()                                         only if all reduced all

ForkServer("mine:train").run({}, ranks=3, recovers=True)

A worker that is killed in a step takes the step with it: nobody commits it. The supervisor starts another in its place,
the workers meet anew, and whoever is behind loads the state of the first that is not. Names are those of torchft 0.2
(Meta, 2025). There is no lighthouse: the supervisor knows who lives.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from unisono.comm.device import beside_cpus
from unisono.launch.context import RankContext
from unisono.spec.rendezvous import Rendezvous


class Reduction:
    """A mean under way. `wait` never raises: an error makes the step one that is not committed."""

    def __init__(self, manager: "Manager", work: Any, tensor: Tensor, count: int) -> None:
        self._manager, self._work, self._tensor, self._count = manager, work, tensor, count

    def wait(self, timeout: object = None) -> bool:
        """Wait until the tensor holds the mean. Returns False where it never will."""
        work, self._work = self._work, None
        if work is not None:
            with self._manager.catch():
                work.wait()
                self._tensor.div_(self._count)
        return self._manager.errored() is None


@final
class Manager:
    """One worker's view of who trains with it, in the shape of `torchft.Manager`.

    context: what the entry function got. load_state_dict, state_dict: how a new worker gets what a live one has;
    `register_state_dict_fn` adds more. min_replica_size: fewer participants commit no step. use_async_quorum: as in
    torchft, a worker that has just got its state adds nothing to that step; if False it takes part at once.
    """

    def __init__(
        self,
        context: RankContext,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
    ) -> None:
        self._context, self._least, self._late = context, min_replica_size, use_async_quorum
        self._next: Rendezvous | None = context.rendezvous
        self._rank, self._world = context.rank, context.world
        self._has_met, self._step, self._committed = False, 0, 0
        self._lost: Exception | None = None  # of a message: the group is of no more use
        self._error: Exception | None = None
        self._participants: list[int] = []
        self._pending: list[Reduction] = []
        self._states: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {}
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], object], state_dict: Callable[[], Any]
    ) -> None:
        """Add a part of what a new worker gets: tensors, numbers and text in dicts and lists. Raises ValueError for a
        key that is registered."""
        if key in self._states:
            raise ValueError(f"{key} is registered already")
        self._states[key] = load_state_dict, state_dict

    def start_quorum(self) -> None:
        """Begin a step: meet anew if a worker was lost, and bring whoever is behind up to date. Raises what ended the
        step before, if it was no loss of another worker."""
        self._error, self._pending = None, []
        while self._lost is not None or not self._has_met:
            if self._lost is not None:
                self._next = self._context.channel.rendezvous(self._lost)
                if self._next is None:
                    raise self._lost
            self._lost = self._error = None
            with self.catch():
                self._meet()
                self._has_met = True
                return
        self._participants = [*range(self._world)]

    def wait_quorum(self) -> None:
        """Does nothing: `start_quorum` returns when the quorum stands."""

    def _meet(self) -> None:
        store = self._context.store
        if self._next is not None:
            meeting, store = self._next.meeting, self._next.store
            self._rank, self._world = meeting.rank, meeting.world
        dist.init_process_group(
            beside_cpus(self._context.backend), store=store, rank=self._rank, world_size=self._world
        )
        mine = torch.tensor([self._step, self._committed])
        everyone = [torch.zeros_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine)
        steps = [int(line[0]) for line in everyone]
        newest = max(steps)
        source = steps.index(newest)
        behind = [rank for rank in range(self._world) if steps[rank] < newest]
        if behind or newest == 0:  # at the start all begin with the state of the first
            self._hand_over(source, behind or [*range(1, self._world)])
        self._step, self._committed = newest, int(everyone[source][1])
        self._participants = [rank for rank in range(self._world) if rank not in behind or not self._late]
        self._context.channel.send("ready", coords={}, step=self._step)

    def _hand_over(self, source: int, behind: Sequence[int]) -> None:
        """The state of rank source becomes that of those behind."""
        written = io.BytesIO()
        if self._rank == source:
            torch.save({key: state() for key, (_, state) in self._states.items()}, written)
        data = torch.frombuffer(bytearray(written.getvalue() or b"-"), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, source)
        data = data if self._rank == source else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        if self._rank in behind:
            states = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
            for key, (load, _) in self._states.items():
                load(states[key])

    def allreduce(self, tensor: Tensor, reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG) -> Reduction:
        """Begin to replace a tensor by its mean (or its sum, SUM) over the participants. After an error it stays as it
        is, and the step is not committed. Raises ValueError for other operations."""
        if reduce_op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(f"{reduce_op}: AVG or SUM")
        count = self.num_participants() if reduce_op == dist.ReduceOp.AVG else 1
        work = None
        if self.errored() is None:
            if not self.is_participating():
                tensor.zero_()
            with self.catch():
                work = dist.all_reduce(tensor, async_op=True)
        reduction = Reduction(self, work, tensor, count)
        self._pending.append(reduction)
        return reduction

    def should_commit(self) -> bool:
        """End a step. Returns whether all have reduced all, so that the optimiser may step: the same on all workers,
        but where one is lost in this very call; then whoever has not committed gets the state of who has."""
        for reduction in self._pending:
            reduction.wait()
        if self._lost is None:
            enough = self.num_participants() >= self._least
            vote = torch.tensor([int(enough and self._error is None)])
            with self.catch():
                dist.all_reduce(vote, dist.ReduceOp.MIN)
        if self._lost is not None or not int(vote):
            return False
        self._step += 1
        self._committed += self.num_participants()
        self._context.channel.send("step", step=self._step)
        return True

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Inside, an error of a message is kept for `should_commit` and the next quorum."""
        try:
            yield
        except RuntimeError as error:
            self._lost = self._error = error

    def report_error(self, error: Exception) -> None:
        """Have no worker commit this step."""
        self._error = error

    def errored(self) -> Exception | None:
        """Return what ended this step, None if nothing has."""
        return self._error

    def current_step(self) -> int:
        """Steps committed by all."""
        return self._step

    def batches_committed(self) -> int:
        """Batches of all participants in the steps committed."""
        return self._committed

    def num_participants(self) -> int:
        """How many add to this step."""
        return len(self._participants)

    def participating_rank(self) -> int | None:
        """This worker's number among the participants, None if it is none."""
        return self._participants.index(self._rank) if self.is_participating() else None

    def is_participating(self) -> bool:
        """Whether this worker adds to this step."""
        return self._rank in self._participants

    def shutdown(self, wait: bool = True) -> None:
        """Leave the others."""
        if self._has_met and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


class ManagedOptimizer(Optimizer):
    """An optimiser that begins a quorum in `zero_grad`, and steps if the step is committed; torchft's wrapper."""

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.manager, self.optim = manager, optim

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.manager.should_commit():
            self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optim.state

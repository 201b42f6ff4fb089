"""A world on threads: many ranks in one process, for tests and notebooks.

    def total(rank: int) -> list[float]:
        x = torch.full((3,), float(rank))
        torch.distributed.all_reduce(x)
        return x.tolist()

    run(4, total)  # [[6.0, 6.0, 6.0], ...], one result a rank

Every rank is a thread with its own torch.distributed and its own state of torch's random numbers. The groups, the mesh
and the collectives of this package do on it what they do between processes.

One rank runs at a time. It runs until it waits for another rank, or sleeps; then the next one in order goes on. So a
run is the same each time, a world in which all wait for each other ends at once, and the error says who waits for what.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from unisono.comm.gone import WorldEnded
from unisono_contrib.comm.thread_group import Room, ThreadGroup, ThreadStore

BACKEND = "threads"
_SLEEP = time.sleep
T = TypeVar("T")


@dataclass(slots=True)
class _TorchState:
    """What torch.distributed keeps for a process, here for one rank; the fields are those of its own `_World`."""

    default_pg: dist.ProcessGroup | None = None
    group_count: int = 0
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    """One rank's thread. turn: released when it may run. waits_for: what it says it waits for. ready: asked by the
    others, whether it may go on. random_state: of torch, while another rank has the turn."""

    number: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    over: bool = False
    result: Any = None
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    torch_state: _TorchState = field(default_factory=_TorchState)


class _World:
    """Ranks that take turns. Only the rank whose turn it is touches anything here, so nothing is locked."""

    def __init__(self, ranks: int, seed: int | None) -> None:
        self.ranks = [_Rank(number) for number in range(ranks)]
        self.store = ThreadStore(self.wait)  # kept here: torch forgets a Python store that nobody holds
        self.rooms: dict[str, Room] = {}
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._order = None if seed is None else random.Random(seed)

    def wait(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Let other ranks run until `ready()`. Raises WorldEnded where that cannot come."""
        if self.error is None and not ready():
            self._let_others_run(ready, waits_for)
        if self.error is not None:
            raise WorldEnded(f"the world has ended: {self.error}")

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`, which polls for what another rank does: time passes only where no other rank can run."""
        others = (rank for rank in self.ranks if rank is not _here() and not rank.over)
        if any(rank.ready() for rank in others):
            self._let_others_run(lambda: True, "time")
        else:
            _SLEEP(seconds)
        self.wait(lambda: True, "time")

    def _let_others_run(self, ready: Callable[[], bool], waits_for: str) -> None:
        me = _here()
        me.ready, me.waits_for = ready, waits_for
        me.random_state = torch.get_rng_state()
        self.give_way(me)
        me.turn.acquire()
        torch.set_rng_state(me.random_state)
        me.ready, me.waits_for = (lambda: True), ""

    def give_way(self, me: _Rank) -> None:
        """The turn goes to the next rank that can run."""
        size = len(self.ranks)
        others = [self.ranks[(me.number + i) % size] for i in range(1, size + 1)]
        left = [rank for rank in others if not rank.over]
        able = [rank for rank in left if self.error is not None or rank.ready()]
        if left and not able:
            lines = [f"rank {rank.number} waits for {rank.waits_for}" for rank in self.ranks if not rank.over]
            gone = [f"rank {rank.number} has returned" for rank in self.ranks if rank.over]
            self.error = WorldEnded("every rank waits for another: " + "; ".join(lines + gone))
            able = left
        if able:
            (self._order.choice(able) if self._order else able[0]).turn.release()
        else:
            self.ended.set()

    def group(self, options: Any, _: Any) -> ThreadGroup:
        """A process group as torch asks a backend for it."""
        ranks = tuple(options.global_ranks_in_group) or tuple(range(len(self.ranks)))  # none means all
        room = self.rooms.setdefault(f"{options.group_id} of {ranks}", Room(ranks))
        return ThreadGroup(options.group_id, options.group_rank, room, self.wait)

    def live(self, me: _Rank, function: Callable[[int], Any], join: bool, threads: int) -> None:
        """The whole life of a rank."""
        _HERE.set((self, me))
        me.turn.acquire()
        try:
            torch.set_num_threads(threads)
            torch.set_rng_state(me.random_state)
            if join:
                dist.init_process_group(BACKEND, store=self.store, rank=me.number, world_size=len(self.ranks))
            me.result = function(me.number)
        except BaseException as error:
            if self.error is None:
                error.add_note(f"raised by rank {me.number} of {len(self.ranks)}")
                self.error = error
        finally:
            with suppress(Exception):
                if dist.is_initialized():
                    dist.destroy_process_group()
            me.over = True
            self.give_way(me)


_HERE: ContextVar[tuple[_World, _Rank]] = ContextVar("the rank of this thread")


def _here() -> _Rank:
    try:
        return _HERE.get()[1]
    except LookupError:
        raise RuntimeError("only a rank's own thread can wait for other ranks") from None


def store() -> dist.Store:
    """The store that the ranks of this world share."""
    return _HERE.get()[0].store


def run(
    ranks: int,
    function: Callable[[int], T],
    *,
    join: bool = True,
    seed: int | None = None,
    timeout: float = 60.0,
    threads: int = 1,
) -> list[T]:
    """`function(rank)` on every rank; returns the results in the order of the ranks.

    join: each rank has called `init_process_group` when the function begins; else the function does it, with backend
    "threads" and `store()`. seed: the next rank is drawn at random instead of in order; results must not depend on
    it. timeout: seconds, for what waits for something else than a rank. threads: of one rank's computation.

    Raises what the first rank to fail raised, with a note that names the rank. Raises WorldEnded when all ranks wait
    for each other. One world at a time, and none inside another: a rank that still computes when its world has timed
    out ends at its next wait, and the next world begins after it. RuntimeError where that takes a minute.
    """
    world = _World(ranks, seed)
    threads_before, random_before = torch.get_num_threads(), torch.get_rng_state()
    with _torch_state_of_each_rank(world.ended):
        for rank in world.ranks:
            args = (rank, function, join, threads)
            threading.Thread(target=world.live, args=args, name=f"rank {rank.number}", daemon=True).start()
        world.ranks[0].turn.release()
        try:
            if not world.ended.wait(timeout):
                left = [rank for rank in world.ranks if not rank.over]
                busy = "; ".join(f"rank {rank.number}: {rank.waits_for or 'runs'}" for rank in left)
                world.error = TimeoutError(f"not over after {timeout:g} s; {busy}")
        except BaseException as error:
            world.error = error
        finally:
            torch.set_num_threads(threads_before)
            torch.set_rng_state(random_before)
    if world.error is not None:
        raise world.error
    return [rank.result for rank in world.ranks]


class _PerThread:
    """Stands in torch for its one state of a process: a rank sees its own, other threads see the process's."""

    def __init__(self, process: Any) -> None:
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state(), name, value)

    def _state(self) -> Any:
        here = _HERE.get(None)
        return object.__getattribute__(self, "_process") if here is None else here[1].torch_state


_ONE_WORLD = threading.Lock()
# Seconds that a rank whose world has timed out may still compute before the next world is refused.
_LINGERS = 60.0


@contextmanager
def _torch_state_of_each_rank(ended: threading.Event) -> Iterator[None]:
    """While this lasts, torch.distributed keeps a state for each rank and not for the process; so does sleep.

    ended: set when no rank of the world lives any more, and only then may another world begin. Ranks of two worlds
    would share what torch keeps for a process while it traces a module, and each would spoil the other's graph.
    """
    inside = _HERE.get(None) is not None
    if not _ONE_WORLD.acquire(timeout=0.0 if inside else _LINGERS):
        raise RuntimeError("there is a world on threads already; one at a time, and none inside another")
    process, hook = c10d._world, sys.excepthook  # joining changes the hook, which is the process's
    try:
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
        c10d._world, time.sleep = _PerThread(process), _sleep  # type: ignore[assignment]
        _set_thread_isolation_mode(True)
        yield
    finally:
        _set_thread_isolation_mode(False)
        c10d._world, sys.excepthook, time.sleep = process, hook, _SLEEP
        if ended.is_set():
            _ONE_WORLD.release()
        else:
            threading.Thread(target=_release_after, args=(ended,), name="world ends", daemon=True).start()


def _release_after(ended: threading.Event) -> None:
    ended.wait()
    _ONE_WORLD.release()


def _sleep(seconds: float) -> None:
    here = _HERE.get(None)
    (_SLEEP if here is None else here[0].sleep)(seconds)


def _make_group(options: Any, backend_options: Any) -> ThreadGroup:
    return _HERE.get()[0].group(options, backend_options)

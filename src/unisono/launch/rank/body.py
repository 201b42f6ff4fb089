"""What every rank does, whoever started it: it makes its process ready, meets the others, plays its part and leaves.

Imports torch: rank side only.
"""

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from unisono.comm.device import built, count
from unisono.launch import transport
from unisono.launch.backend import CPUS, Equipment, choose, has_mpi, settings, visible
from unisono.launch.context import Channel, RankContext
from unisono.launch.malloc_tuning import keep_freed_memory, remember_few_collectives
from unisono.spec.rendezvous import RankMeeting, Rendezvous

Entry = Callable[[RankContext, dict[str, Any], Any], dict[str, Any] | None]
T = TypeVar("T", covariant=True)


class Side(Protocol[T]):
    """What differs by who started a rank.

    enter(): meets the other ranks; returns this rank's place and what it is to run. shared(ctx): what all ranks share,
    as `prepare` of the entry's module returned it. ended(ctx, result): parts from the others and reports the result.
    failed(ctx, error): reports an error; ctx is None if the ranks had not met.
    """

    def enter(self) -> tuple[RankContext, Entry]: ...

    def shared(self, ctx: RankContext) -> Any: ...

    def ended(self, ctx: RankContext, result: Any) -> T: ...

    def failed(self, ctx: RankContext | None, error: BaseException) -> T: ...


def live(side: Side[T], argument: dict[str, Any]) -> T:
    """The whole life of a rank. SystemExit is an error too: a rank that leaves early has failed."""
    ctx = None
    try:
        ctx, entry = side.enter()
        keep_freed_memory(os.environ)
        return side.ended(ctx, entry(ctx, argument, side.shared(ctx)))
    except BaseException as error:
        return side.failed(ctx, error)


def enter(
    place: RankMeeting,
    threads: int,
    wanted: str,
    channel: Channel,
    meet: Callable[[], Any],
    *,
    leads: str = "",
    serves: int = 0,
    joins: bool = False,
    **more: Any,
) -> RankContext:
    """Make this process a rank: environment, network device, threads, store and backend.

    threads: of torch. wanted: the backend, as `backend.choose` reads it. meet(): the store, once the network device is
    set. leads: the name or address at which ranks of several hosts meet; "" if all are on this host. serves: for how
    many ranks of this host the backend has to do, if for more than there are. joins: whether it takes a lost rank's
    place among others that train. more: further fields of the context. Raises UsageError U-L08 for a backend that
    cannot be had.
    """
    host = socket.gethostname()
    set_environment(place)
    # On one host neither Gloo nor NCCL then listens where others could connect.
    one_host, leading = not leads, transport.leading_to(leads) if leads else ()
    devices = () if one_host else transport.transports()
    route = transport.choose(devices, leading, one_host, os.environ, leads)
    os.environ.update(route.settings)
    torch.set_num_threads(threads)
    store = meet()
    os.environ.update(settings(wanted, host, place.local_rank))
    backend = choose(wanted, max(place.local_world, serves), equipment())
    if backend.name == CPUS:
        remember_few_collectives(os.environ)
    if place.rank == 0 and backend.note:
        channel.send("note", text=backend.note)
    return RankContext(
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        local_world=place.local_world,
        host=host,
        threads=threads,
        backend=backend.name,
        store=store,
        channel=channel,
        means=f"backend {backend.name} ({backend.why}), transport {route.device or 'not known'} ({route.why})",
        epoch=place.epoch,
        rendezvous=Rendezvous(place, store) if joins else None,
        **more,
    )


def equipment() -> Equipment:
    """What this host has for its ranks."""
    return Equipment(count(), built(), has_mpi(), visible(os.environ))


def set_environment(place: RankMeeting) -> None:
    """What a user's code may read, by torchrun's names."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
    )

"""Who calls whom: all workers of a run exchange names and addresses through the store in which its ranks meet."""

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from unisono.launch.context import NullChannel, RankContext
from unisono.launch.env import Started, place_here
from unisono.launch.link import proof
from unisono.launch.rank import under
from unisono.launch.run.membership import Role
from unisono.spec.errors import UsageError
from unisono_contrib.rpc.errors import CallTimeout, no_member
from unisono_contrib.rpc.switchboard import WorkerInfo

_LOOK = 0.01  # seconds between two looks into the store, which a Ctrl-C may interrupt


@dataclass(frozen=True, slots=True)
class CallMeeting:
    """One worker's way to the others. rank: its number among `size` workers: trainers first, servers behind. name: by
    which it is known where the script names none. token: what only workers of this run know."""

    rank: int
    size: int
    name: str
    store: Any
    token: str = field(repr=False)

    def enter(self, name: str, timeout: float) -> tuple[list[WorkerInfo], list[str]]:
        """Say who this is and hear who the others are: all workers by rank, and the addresses of this one's host at
        which they can reach it. Raises CallTimeout if one does not come, UsageError Q06 for a name that two have."""
        life = secrets.token_hex(8)
        said = {
            "name": name,
            "host": socket.gethostname(),
            "rank": self.rank,
            "life": life,
            "network": _network(),
        }
        self.store.set(f"rpc/worker/{self.rank}", json.dumps(said))
        all_said = [
            json.loads(self.value(f"rpc/worker/{rank}", timeout, f"rank {rank}")) for rank in range(self.size)
        ]
        infos = [WorkerInfo.read(each) for each in all_said]
        names = [info.name for info in infos]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise no_member(f"two workers are called {twice[0]}", "rpc.init(name) with a name for each")
        return infos, _addresses({each["network"] for each in all_said})

    def publish(self, name: str, door: dict[str, Any]) -> None:
        self.store.set(f"rpc/door/{name}", json.dumps(door))

    def door(self, name: str, timeout: float) -> dict[str, Any]:
        """Where a worker can be reached now. Raises CallTimeout."""
        return json.loads(self.value(f"rpc/door/{name}", timeout, f"worker {name}"))

    def value(self, key: str, timeout: float, who: str) -> bytes:
        """Raises CallTimeout, which names who did not come."""
        until = time.monotonic() + timeout
        while not self.store.check([key]):
            if time.monotonic() > until:
                fix = "start it, or rpc.init(timeout=...)"
                raise CallTimeout(f"{who} has not come within {timeout:g} s", where="unisono.rpc", fix=fix)
            time.sleep(_LOOK)
        return self.store.get(key)


def meet(context: RankContext | None, timeout: float) -> CallMeeting:
    """This process's way to the others of its run, whoever started it; alone where nobody did.

    In this order: a context, the initialised process group, the environment (torchrun, Slurm, MPI, TF_CONFIG,
    variables). Raises UsageError."""
    if context is not None:
        return _meeting(context.rank, context.world, context.store, context.run_token)
    place = _place(dist.is_initialized())
    if place is not None:
        return _of_place(place, timeout)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return _meeting(
            dist.get_rank(), dist.get_world_size(), store, _common_token(store, dist.get_rank(), timeout)
        )
    return _meeting(0, 1, dist.HashStore(), secrets.token_hex(16))


def _place(joined: bool) -> Started | None:
    """What the environment says; ranks that have joined already ask it only for servers beside them."""
    if not joined:
        return place_here()
    with suppress(UsageError):  # ranks of a supervisor have a part of the variables
        place = place_here()
        return place if place is not None and place.servers else None
    return None


def _of_place(place: Started, timeout: float) -> CallMeeting:
    """Raises UsageError, CallTimeout."""
    if place.role is Role.TRAINER and not dist.is_initialized():
        context = under.join(place, NullChannel(), timeout=timeout)
        return _meeting(place.rank, place.world + place.servers, context.store, context.run_token, place.name)
    return meet_at(place, under.stand_beside(place, timeout), timeout)


def meet_at(place: Started, store: Any, timeout: float = 600.0) -> CallMeeting:
    """The way to the others of a process that has their store. Raises CallTimeout."""
    size = place.world + place.servers
    token = (
        CallMeeting(place.rank, size, place.name, store, "").value("run_token", timeout, "rank 0").decode()
    )
    return _meeting(place.rank, size, store, token, place.name)


def _meeting(rank: int, size: int, store: Any, token: str, name: str = "") -> CallMeeting:
    """The token of remote calls is not the run's own: who hears it could do no more than call."""
    return CallMeeting(rank, size, name or f"worker{rank}", store, proof(token, "remote calls"))


def _common_token(store: Any, rank: int, timeout: float) -> str:
    if rank == 0:
        store.compare_set("rpc/token", "", secrets.token_hex(16))
    return CallMeeting(rank, 1, "", store, "").value("rpc/token", timeout, "rank 0").decode()


def _network() -> str:
    """The same for all processes that reach each other over loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def _addresses(networks: set[str]) -> list[str]:
    if len(networks) == 1:
        return ["127.0.0.1"]
    devices = psutil.net_if_addrs().values()
    every = [each.address for device in devices for each in device if each.family == socket.AF_INET]
    return [address for address in every if not address.startswith("127.")] or ["127.0.0.1"]

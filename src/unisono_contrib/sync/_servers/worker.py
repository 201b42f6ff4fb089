"""A replica's side of parameter servers: pull before a step, push after its backward, gather for evaluation and saving.

Each rank speaks with the servers of its own part of the parameters, so that a replica may be cut in any way. One rank
of a replica, its speaker, tells the sequencer what the replica does.
"""

import secrets
import select
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.hosts import mark, own_address
from unisono.spec.errors import PeerGone
from unisono.sync import Verdict
from unisono.sync._outer import OuterSync, Site
from unisono_contrib.sync._servers import wire
from unisono_contrib.sync._servers.host import SequencerHost, ShardHost
from unisono_contrib.sync._servers.rules import Rule
from unisono_contrib.sync._servers.salvage import Tell, salvage
from unisono_contrib.sync._servers.sequencer import Sequencer, UpdateSchedule
from unisono_contrib.sync._servers.shard import Shard, shares
from unisono_contrib.sync._servers.wire import Message

_LOOK = 0.002  # seconds of waiting for a server, between which other ranks on threads may run
_KEY = 24  # bytes
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Offer:
    """What replicas do with servers. rule: of the sequencer. compensation: see `Shard`. keeps_late: whether a gradient
    that came too late is added to the next one of its replica. copies: servers that hold each parameter."""

    rule: Rule
    compensation: float = 0.0
    keeps_late: bool = False
    copies: int = 1


@dataclass(slots=True)
class _Links:
    """What one rank has open. holders[copy][place]: to each server of its part. sequencer: on a speaker. hosts: servers
    here."""

    holders: list[list[Connection]] = field(default_factory=list)
    sequencer: Connection | None = None
    hosts: list[SequencerHost | ShardHost] = field(default_factory=list)

    @property
    def shards(self) -> list[Connection]:
        """Those that this rank reads from."""
        return self.holders[0]

    @property
    def shard_hosts(self) -> list[ShardHost]:
        return [host for host in self.hosts if isinstance(host, ShardHost)]

    @property
    def every(self) -> list[Connection]:
        """To all servers of its part."""
        return [connection for copy in self.holders for connection in copy]

    def hung_up(self) -> Connection | None:
        """To a server that has gone."""
        poll, by_file = select.poll(), {connection.fileno(): connection for connection in self.every}
        for file in by_file:
            poll.register(file, select.POLLRDHUP)
        return next((by_file[file] for file, _ in poll.poll(0)), None)

    def close(self) -> None:
        for connection in (*self.every, *([self.sequencer] if self.sequencer else [])):
            wire.hang_up(connection)
        for host in self.hosts:
            host.close() if isinstance(host, ShardHost) else host.listener.close()


class ServerSync(OuterSync):
    """State: `NAME/late`, each replica's own, where late gradients are kept. Weights and the optimiser's state are the
    servers'; `center` puts them where a rank of a run without servers has them, so checkpoints are as usual."""

    def __init__(self, site: Site, offer: Offer) -> None:
        super().__init__(site)
        self.offer, self.keeps_weights = offer, False
        self.private = self.shares = offer.keeps_late
        # Where replicas were lost, those that are left carry fewer servers.
        self.servers = min(site.servers, self.group.size)
        slots = list(site.learning())
        parts = shares({slot.name: slot.master.nbytes for slot in slots}, self.servers)
        by_name = {slot.name: slot for slot in slots}
        self.parts = [[by_name[name] for name in part] for part in parts]
        self._late = {s.name: torch.zeros_like(s.master) for s in slots} if offer.keeps_late else {}
        self._begun, self._final, self._next = False, -1, 0
        self._waited, self._since, self._idle = 0.0, time.perf_counter(), 0.0
        self._tally: dict[str, Any] = {}
        self._served = 0
        self._links = _connect(site, offer, self.parts)
        weakref.finalize(self, self._links.close)

    # A step.

    def before_step(self, step: int) -> None:
        super().before_step(step)
        if not self._begun:
            self._begin(step)
        self._tell("ready", step=step)
        for part, (said, weights) in zip(self.parts, self._hear("read"), strict=True):
            self._final = said["final"]
            _put([slot.master for slot in part], weights)

    def meets(self, step: int) -> bool:
        return step == self._final

    def settle(self) -> Verdict:
        self.inner.settle()
        return Verdict.REMOTE

    @torch.no_grad()
    def deliver(self, step: int, norm: float, stop: bool) -> None:
        for part, holders in zip(self.parts, zip(*self._links.holders, strict=True), strict=True):
            data = wire.packed({"op": "push", "step": step}, [self._whole(slot) for slot in part])
            for connection in holders:
                self._send(connection, data, "push")
        finite = norm == norm and abs(norm) != float("inf")
        self._tell("announce", step=step, norm=norm if finite else None, stop=stop)
        said = self._hear("took")[0][0]
        self._next = said["next"]
        self._tally = said.get("tally", {})
        for slot in self.site.learning() if self._late and finite else ():
            if said["late"] and slot.master.grad is not None:
                self._late[slot.name] += slot.master.grad
            elif not said["late"]:
                self._late[slot.name].zero_()
        now = time.perf_counter()
        self._idle, self._waited, self._since = self._waited / max(now - self._since, 1e-9), 0.0, now

    def _whole(self, slot: Any) -> Tensor | None:
        """The gradient with what came too late before."""
        grad, late = slot.master.grad, self._late.get(slot.name)
        return grad if late is None or grad is None else grad + late

    def next_step(self, step: int) -> int:
        return max(self._next, step + 1)

    def exchange(self, step: int) -> None:
        if step == self._final:
            self.average_buffers()

    def merge(self, step: int) -> None:
        return None

    # Beginning, and what is kept.

    def _begin(self, step: int) -> None:
        """Let the servers begin with what the first replica has."""
        if self.group.index == 0:
            for part, holders in zip(self.parts, zip(*self._links.holders, strict=True), strict=True):
                data = wire.packed({"op": "fill"}, [*(slot.master for slot in part), *self._states(part)])
                for connection in holders:
                    self._send(connection, data, "fill")
        self._tell("begin", step=step)
        self._hear("begun")
        self._begun = True

    def _states(self, part: Sequence[Any]) -> list[Tensor]:
        """What this rank's optimiser keeps of these parameters, as `Shard.states` orders it."""
        kept = (self.site.optimizer.state.get(slot.master, {}) for slot in part)
        return [x for state in kept for _, x in sorted(state.items()) if isinstance(x, Tensor)]

    def center(self) -> Mapping[str, Tensor]:
        """Every replica calls it, or it hangs: its weights and optimiser state are the run's afterwards."""
        if self._begun:
            self._tell("gather")
            for part, (_, tensors) in zip(self.parts, self._hear("gather"), strict=True):
                _put([*(slot.master for slot in part), *self._states(part)], tensors)
            self.group.barrier()
            self.site.replica.barrier()  # a server may end now, since all ranks have what they asked for
            self._count_served()
        return {slot.name: slot.master.data for part in self.parts for slot in part}

    def salvage(self, tell: Tell) -> tuple[int, frozenset[str]] | None:
        version, hosts = salvage(self._links.shard_hosts, tell)
        for host in hosts:
            part = self.parts[host.place]
            _put([*(slot.master for slot in part), *self._states(part)],
                 [*host.shard.params.values(), *host.shard.states()])  # fmt: skip
        names = frozenset(slot.name for host in hosts for slot in self.parts[host.place])
        return (version // self.offer.rule.updates_per_step, names) if version >= 0 else None

    def agree(self) -> None:
        """After a run was restored, the next step begins with servers that know nothing of the one before."""
        self._begun = False

    def state(self) -> Mapping[str, Tensor]:
        return {**self.inner.state(), **{f"{name}/late": x for name, x in self._late.items()}}

    def is_private(self, key: str) -> bool:
        return key.endswith("/late") or self.inner.is_private(key)

    def metrics(self) -> Mapping[str, Any]:
        """staleness_counts[i]: gradients of staleness i since the last line. effective_batch: samples of an update.
        idle_share: of this rank's time, waiting for servers."""
        said, tally, self._tally = {"idle_share": round(self._idle, 4)}, self._tally, {}
        if not tally:
            return {**self.inner.metrics(), **said}
        counts, samples = tally["staleness"], self.site.batch / self.group.size
        mean = sum(i * n for i, n in enumerate(counts)) / max(1, sum(counts))
        batch = {"effective_batch": samples * tally["used"] / tally["updates"]} if tally["updates"] else {}
        more = {name: tally[name] for name in ("late", "refused", "waits") if tally[name]}
        staleness = {"staleness": mean, "staleness_counts": counts}
        return {**self.inner.metrics(), **said, **staleness, **batch, **more}

    # Messages.

    def _tell(self, op: str, **said: Any) -> None:
        if self._links.sequencer is not None:
            self._send(self._links.sequencer, wire.packed({"op": op, **said}), "say")

    def _send(self, connection: Connection, data: bytes, op: str) -> None:
        self.group.recorder.count("dp", op, len(data))
        try:
            connection.send_bytes(data)
        except OSError as error:
            raise self._gone(connection) from error

    def _hear(self, op: str) -> list[Message]:
        """What each server of this rank's part says next."""
        begun = time.perf_counter()
        with self.group.recorder.span("wait", axis="dp", op=op):
            heard = [self._next_of(connection) for connection in self._links.shards]
        self._waited += time.perf_counter() - begun
        self._count_served()
        return heard

    def _count_served(self) -> None:
        """Note in the ledger what the servers here have sent since it was noted last."""
        sent = sum(host.sent for host in self._links.shard_hosts)
        self.group.recorder.count("dp", "serve", sent - self._served)
        self._served = sent

    def _next_of(self, connection: Connection) -> Message:
        try:
            while not wait([connection], _LOOK):
                time.sleep(0)
                gone = self._links.hung_up()
                # Without it no update is made, so nothing comes from here either, but what is here already.
                if gone is not None and not wait([connection], 0):
                    raise self._gone(gone)
            return wire.unpacked(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise self._gone(connection) from error

    def _gone(self, connection: Connection) -> PeerGone:
        at = (copy + holders.index(connection) for copy, holders in enumerate(self._links.holders)
              if connection in holders)  # fmt: skip
        rank = self.group.ranks[next(at, 0) % self.group.size]
        what = f"the server on rank {rank} has gone; rank {self.group.ranks[self.group.index]} waited for it"
        return PeerGone(
            what, likely="its process was killed, or failed: what it printed last says more", rank=rank
        )


@torch.no_grad()
def _put(masters: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Sparse values have the rows that are to change."""
    for master, value in zip(masters, values, strict=True):
        if value is None:
            raise ValueError("a server that has no weights")
        if value.is_sparse:
            master.index_copy_(0, value.indices()[0].to(master.device), value.values().to(master.device))
        else:
            master.copy_(value)


def _connect(site: Site, offer: Offer, parts: Sequence[Sequence[Any]]) -> _Links:
    """Start the servers of this rank, if it carries some, and connect to all that it speaks with. Every rank of the
    run calls it, or it hangs."""
    dp, inside = site.dp, site.replica
    links, key, copies = _Links(), secrets.token_bytes(_KEY), min(offer.copies, site.dp.size)
    address, bound = _addresses(site)
    is_first = dp.index == 0 and inside.index == 0
    if is_first:
        schedule = UpdateSchedule(site.rate, site.max_norm, site.steps)
        shards = len(parts) * inside.size
        sequencer = Sequencer(offer.rule, schedule, range(dp.size), shards, copies=copies)
        links.hosts.append(SequencerHost(sequencer, bound, key))
    for copy in range(copies):
        if (place := (dp.index - copy) % dp.size) < len(parts):
            shard = _shard(site, parts[place], offer.compensation)
            links.hosts.append(ShardHost(shard, bound, key, place, copy))
    ports = [0] * (1 + copies)
    for host in links.hosts:
        ports[1 + host.copy if isinstance(host, ShardHost) else 0] = host.listener.port
    mine = _record(address, ports, key)
    peers = dp.all_gather(mine.to(site.device)).cpu()
    first = inside.all_gather(peers[:1].to(site.device)).cpu()[:1]
    host, (door, *_), lock = _read(first[0])
    for each in links.shard_hosts:
        each.follow(host, door, lock, (each.copy * len(parts) + each.place) * inside.size + inside.index)
    if inside.index == 0:
        links.sequencer = wire.call(host, door, lock, {"kind": "worker", "number": dp.index})
    for copy in range(copies):
        links.holders.append([])
        for place in range(len(parts)):
            to, ports, lock = _read(peers[(place + copy) % dp.size])
            caller = {"kind": "worker", "number": dp.index}
            links.holders[copy].append(wire.call(to, ports[1 + copy], lock, caller))
    inside.barrier()
    dp.barrier()  # all are connected before one says a word
    inside.barrier()
    return links


def _shard(site: Site, part: Sequence[Any], compensation: float) -> Shard:
    """A server's part: copies of these parameters under the recipe's optimiser."""
    slots = []
    for slot in part:
        p = nn.Parameter(slot.master.detach().cpu().clone())
        slots.append(replace(slot, live=p, master=p, alias=False))
    if site.optimizer_over is None:
        raise TypeError("servers have the recipe's optimiser, and nobody said which that is")
    sparse = frozenset(slot.name for slot in slots if slot.sparse)
    params = {slot.name: slot.master for slot in slots}
    return Shard(
        params, site.optimizer_over(slots), set(range(site.dp.size)), compensation, sparse, site.counted
    )


def _addresses(site: Site) -> tuple[str, str]:
    """Where others reach this host, and where its servers listen. Every rank of the run calls it, or it hangs."""
    marks = site.dp.all_gather(torch.tensor([mark()], device=site.device))
    marks = site.replica.all_gather(marks[None])
    if bool((marks == marks.flatten()[0]).all()):
        return _LOOPBACK, _LOOPBACK
    return own_address(), ""


def _record(address: str, ports: Sequence[int], key: bytes) -> Tensor:
    """uint8 [1, 28 + 4 * ports]: an address, ports, a key."""
    data = socket.inet_aton(address) + b"".join(port.to_bytes(4, "big") for port in ports) + key
    return torch.tensor([list(data)], dtype=torch.uint8)


def _read(record: Tensor) -> tuple[str, list[int], bytes]:
    data = bytes(record.tolist())
    ports = [int.from_bytes(data[at : at + 4], "big") for at in range(4, len(data) - _KEY, 4)]
    return socket.inet_ntoa(data[:4]), ports, data[-_KEY:]

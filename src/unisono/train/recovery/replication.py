"""Copies of snapshots in the memory of another host: what outlives the loss of a whole one.

Each rank sends its snapshot to one of the next host, and keeps those of its *peers*, ranks of the host before. Own
snapshots and copies are of the same steps everywhere, so that any host may go. A thread sends and receives while steps
are made, over connections of its own; the next snapshots are put aside when all ranks have their copies.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from unisono.train.build.build import Place
from unisono.train.recovery.snapshot_buffer import Snapshot, SnapshotBuffer, parts


def keepers(hosts: Sequence[int]) -> list[int]:
    """For each rank, the rank of the next host that keeps its copy, in turn. hosts: for each rank, a number that
    its host's ranks share; at least two."""
    names = sorted(set(hosts))
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    return [
        ranks[following[host]][ranks[host].index(rank) % len(ranks[following[host]])]
        for rank, host in enumerate(hosts)
    ]


class SnapshotReplicas:
    """A rank's copies elsewhere, and those that it keeps for others, from one meeting of the ranks to the next.

    buffer: where its own snapshots lie.
    """

    def __init__(self, buffer: SnapshotBuffer) -> None:
        self._buffer = buffer
        self._peers: list[SnapshotBuffer] = []

    def snapshots(self) -> list[Snapshot]:
        """The whole snapshots that are kept here for others."""
        return [snapshot for peer in self._peers for snapshot in peer.snapshots()]

    def drop(self, after: int) -> None:
        """Forget replicas of later steps than `after`."""
        for peer in self._peers:
            peer.drop(after)

    def copies(self, place: Place, store: Any, hosts: Sequence[int]) -> "Replication":
        """For the ranks that have met. store: of this meeting. Every one calls it, or it hangs."""
        keeper = keepers(hosts)
        peers = [rank for rank, to in enumerate(keeper) if to == place.rank]
        while len(self._peers) > len(peers):
            self._peers.pop().close()
        self._peers += [SnapshotBuffer.new() for _ in peers[len(self._peers) :]]
        # Not by `new_group`: it names a group by how many a rank has made before, in which stages differ.
        pg = ProcessGroupGloo(dist.PrefixStore("copies", store), place.rank, place.world, place.timeout)
        return Replication(pg, self._buffer, keeper[place.rank], dict(zip(peers, self._peers, strict=True)))


class Replication:
    """Snapshots that go to other hosts, one after the other, beside the run's steps. pg: a Gloo group of all ranks, for
    nothing else. keeper: the rank that this one sends to. peers: from whom it receives, and where to."""

    def __init__(
        self, pg: Any, buffer: SnapshotBuffer, keeper: int, peers: dict[int, SnapshotBuffer]
    ) -> None:
        self._pg, self._buffer, self._keeper, self._peers = pg, buffer, keeper, peers
        self._thread: threading.Thread | None = None
        self._files, self._ended = threading.Lock(), False
        self.failed = ""
        """Why nothing is copied any more, if so."""
        self.seconds: list[float] = []
        """That copies took, since they were last looked at."""

    def begin(self) -> None:
        """Copy the newest snapshots. Every rank begins, after the same step; `ready` again when it is over."""
        self._thread = threading.Thread(target=self._copy, name="unisono-copies", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether this rank's last copies are over, so that what they were made from may change."""
        return self._thread is None or not self._thread.is_alive()

    def settle(self, within: float | None = None) -> None:
        """Wait for the copies under way. within: seconds at most."""
        if self._thread is not None:
            self._thread.join(within)

    def end(self, within: float) -> None:
        """Wait as `settle` does; after that no file is touched any more, however long a message is still waited for.
        The buffers' files may be closed then, and their numbers be those of others."""
        self.settle(within)
        with self._files:
            self._ended = True

    def _copy(self) -> None:
        begun = time.perf_counter()
        try:
            self._exchange()
        except (OSError, RuntimeError) as error:  # a rank was lost, or memory is short
            self.failed = str(error)
        self.seconds.append(time.perf_counter() - begun)

    def _exchange(self) -> None:
        with self._at_files():
            file, nbytes = self._buffer.newest()
        sizes = {peer: torch.zeros(1, dtype=torch.int64) for peer in self._peers}
        coming = [self._pg.recv([size], peer, 0) for peer, size in sizes.items()]
        _wait([*coming, self._pg.send([torch.tensor([nbytes])], self._keeper, 0)])
        mine = parts(nbytes)
        theirs = {peer: parts(int(size)) for peer, size in sizes.items()}
        with self._at_files():
            files = {peer: self._peers[peer].older() for peer, pieces in theirs.items() if pieces}
        for number in range(max(len(mine), *(len(pieces) for pieces in theirs.values()), 0)):
            due = {peer: pieces[number] for peer, pieces in theirs.items() if number < len(pieces)}
            arriving = {peer: torch.empty(count, dtype=torch.uint8) for peer, (_, count) in due.items()}
            works = [self._pg.recv([x], peer, 0) for peer, x in arriving.items()]
            if number < len(mine):
                with self._at_files():
                    part = _read(file, *mine[number])
                works.append(self._pg.send([part], self._keeper, 0))
            _wait(works)
            with self._at_files():
                for peer, x in arriving.items():
                    self._write(files[peer], x, due[peer][0])

    @contextmanager
    def _at_files(self) -> Iterator[None]:
        """While it lasts the buffers' files are there. Raises OSError after the end."""
        with self._files:
            if self._ended:
                raise OSError("the ranks meet anew")
            yield

    def _write(self, file: int, x: Tensor, at: int) -> None:
        """A part of a peer's snapshot. Once one could not be written, the head is not either."""
        if self.failed:
            return
        try:
            if os.pwrite(file, x.numpy().data, at) < x.numel():
                raise OSError("no memory for a copy of another rank's snapshot")
        except OSError as error:
            self.failed = str(error)


def _read(file: int, at: int, count: int) -> Tensor:
    x = torch.empty(count, dtype=torch.uint8)
    if os.preadv(file, [x.numpy().data], at) < count:
        raise OSError("a snapshot ends too early")
    return x


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()

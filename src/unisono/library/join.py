"""Data of each rank's own, of uneven lengths: files that were handed out beforehand, streams, shards of unlike sizes.

Every rank makes as many steps as the longest. The global batch of a step is what the ranks have left for it. A rank
that has run out computes on a sample of its last batch, with weight 0, so that nobody waits for it: Horovod's and
DDP's `join`, but a mean over samples, where theirs is one over ranks.

A checkpoint keeps the place of each rank in its own data, as one of global batches does: the pass, the
random numbers with which it began, and the batches used. It goes on on the same number of ranks.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from unisono.library.batch_sharding import PlacedLoader, as_before, generators_of, other_order, states_now
from unisono.library.batches import cut, digest, glance_at, samples_in
from unisono.library.current_batch import CurrentBatch, Walk
from unisono.library.exchange import ScalarExchange
from unisono.library.randomness import Streams
from unisono.spec.errors import UsageError


class JoinedLoader(PlacedLoader):
    """This rank's own batches, and after them one sample again and again, until no rank has a batch left."""

    def _begun(self, walk: Walk, going_on: Mapping[str, Any]) -> Iterator[Any]:
        if "ranks" in going_on:
            raise self._other_ranks(going_on["ranks"])
        for batch, counts, chain in self._batches(walk, going_on):
            self._batch.joined(batch, counts, walk, chain)
            yield batch

    def _batches(self, walk: Walk, going_on: Mapping[str, Any]) -> Iterator[tuple[Any, list[int], int]]:
        """Yield for each step left of this pass: a batch, the samples of each rank that count, the order so far."""
        generators, place = generators_of(self._source), 0
        self._start = going_on.get("random") or states_now(generators)
        before = as_before(self._start, generators) if going_on else nullcontext
        with before():
            batches = iter(self._source)
        skip, borrowed, chain = going_on.get("place", 0), None, 0
        while True:
            with before():
                batch = next(batches, None)
            samples = 0 if batch is None else samples_in(batch)
            if batch is not None:
                chain = digest(f"{chain} {glance_at(batch)}".encode())
                borrowed = cut(batch, samples, 0, 1)
            place += 1
            if place == skip and chain != going_on["chain"]:
                raise other_order(self._source, place)
            if place <= skip:
                continue
            counts = self._exchange.gather(samples)
            if not sum(counts):
                return
            if place == 1 and not all(counts):
                raise self._nothing(counts.index(0))
            walk.fetched = place - 1
            walk.fetched_chain = chain
            yield (borrowed if batch is None else batch), counts, chain

    def _nothing(self, rank: int) -> UsageError:
        return UsageError(
            f"rank {rank} has not one batch, so it has nothing to compute on while the others train",
            where="job.join",
            fix="at least one sample for each rank, or fewer ranks",
            code="J03",
        )

    def _other_ranks(self, ranks: int) -> UsageError:
        return UsageError(
            f"the checkpoint was saved within a pass of {ranks} ranks, each with data of its own, and here are"
            f" {self._exchange.group.size}: who reads what is left is not known",
            where="job.join",
            fix=f"{ranks} ranks until the pass is over; or save between two passes",
            code="J17",
        )


class JoinedLoaders:
    """The joined loaders of a job, in the order in which the script makes them, and their places in checkpoints.

    A script may make one for each pass, so a checkpoint keeps the places of those that are in use when it is saved. The
    first ones that the script has or makes after `load` go on there.
    """

    def __init__(self, current_batch: CurrentBatch, exchange: ScalarExchange, streams: Streams) -> None:
        self._batch, self._exchange, self._streams = current_batch, exchange, streams
        self._count = 0
        self._alive: list[weakref.ref[JoinedLoader]] = []
        self._kept: list[dict[str, Any]] = []  # places that no loader has taken up yet

    def of(self, data: Iterable[Any]) -> JoinedLoader:
        """Make one more loader."""
        self._count += not self._kept  # one that goes on was counted when it was made
        loader = JoinedLoader(data, self._batch, self._exchange, self._streams, -self._count)
        if self._kept:
            loader.state = self._kept.pop(0)
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(loader)]
        return loader

    @property
    def state(self) -> dict[str, Any]:
        """This rank's, as JSON."""
        alive = [loader.state for ref in self._alive if (loader := ref()) is not None]
        return {"made": self._count, "ranks": self._exchange.group.size, "loaders": [*alive, *self._kept]}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        ranks, places = state["ranks"], state["loaders"]
        if ranks != self._exchange.group.size:
            places = [saved | {"ranks": ranks} if "place" in saved else saved for saved in places]
        alive = [loader for ref in self._alive if (loader := ref()) is not None]
        for loader, place in zip(alive, places, strict=False):
            loader.state = place
        self._kept = list(places[len(alive) :])
        self._count = max(self._count, state["made"])

"""Shard global batches: every rank iterates over the same batches and takes its own part of the samples of each.

A loader with a batch sampler fetches only the samples of this rank; anything else that yields batches is cut. Parts
differ by one sample at most. A rank without a sample gets one of another rank's, with weight 0, so that every
rank makes the same steps.

A checkpoint keeps the place: the pass, the random numbers it began with, and the batches used. After `load` the next
pass goes on there, on any number of ranks, and is refused if it would come in another order.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from unisono.comm.device import is_apart
from unisono.library.batches import cut, digest, digest_of, glance_at, samples_in
from unisono.library.current_batch import CurrentBatch, Walk, part
from unisono.library.exchange import ScalarExchange
from unisono.library.explain import explained
from unisono.library.modes import unwatched
from unisono.library.randomness import (
    BySample,
    Streams,
    all_states,
    draws,
    kept,
    seed_of,
    set_all_states,
    state_of,
)
from unisono.spec.errors import UsageError

Context = Callable[[], AbstractContextManager[None]]


def states_now(generators: Sequence[torch.Generator]) -> list[Any]:
    """Return the states of torch's, Python's and NumPy's generators, and of these, as JSON values."""
    return [all_states(), *own_states(generators)]


def own_states(generators: Sequence[torch.Generator]) -> list[str]:
    """Return the states of a loader's own generators, as JSON values."""
    return [g.get_state().numpy().tobytes().hex() for g in generators]


def set_own_states(generators: Sequence[torch.Generator], states: Sequence[str]) -> None:
    """The reverse of `own_states`; a loader may have got another generator since."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state_of(state))


def keep_workers_waiting(loader: Any) -> None:
    """Starts workers that stay from pass to pass (`persistent_workers`), and takes no random number for it. For the
    first pass that a process makes, if others were made before it: the loader draws a seed for its workers in the pass
    that starts them, and in none after it."""
    if not getattr(loader, "persistent_workers", False) or loader._iterator is not None:
        return
    generators, attributes = generators_of(loader), vars(loader)
    states, order = own_states(generators), {name: attributes[name] for name in ("sampler", "batch_sampler")}
    nothing = {name: [] for name, value in order.items() if value is not None}
    with kept():
        attributes.update(nothing)  # around the guard of names that its iterator may use: there is none yet
        try:
            iterator: Any = iter(loader)  # which keeps what says the order
        finally:
            attributes.update(order)
    iterator._index_sampler = loader._index_sampler
    set_own_states(generators, states)


def as_before(states: Sequence[Any], generators: Sequence[torch.Generator]) -> Context:
    """A context with the random numbers of a pass that was begun in another process, as `states_now` wrote them; around
    it, all but the loader's own generators stay as they are."""
    now, *own_generators = states
    inside = False
    set_own_states(generators, own_generators)

    @contextmanager
    def before() -> Iterator[None]:
        nonlocal now, inside
        if inside:  # a loader with workers asks for its first batches as it is made
            yield
            return
        with kept():
            set_all_states(now)
            inside = True
            try:
                yield
            finally:
                now, inside = all_states(), False

    return before


def generators_of(data: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers have of their own."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = (getattr(owner, "generator", None) for owner in owners)
    known = [g for g in generators if isinstance(g, torch.Generator) and not is_apart(g.device)]
    return list({id(g): g for g in known}.values())


def other_order(data: Any, place: int) -> UsageError:
    """Return error J17."""
    return UsageError(
        f"the first {place} batches of this pass are not those that it began with before the checkpoint",
        where=type(data).__name__,
        likely="a sampler that counts its own passes, or draws from a generator of its own",
        fix="a sampler whose order follows from set_epoch(epoch) or torch's random numbers; or save after a pass",
        code="J17",
    )


class Slices:
    """A batch sampler that gives this rank's part of each batch of another. Unknown attributes are the other's."""

    def __init__(self, batches: Any, index: int, size: int, seed: int, by_sample: bool) -> None:
        self._batches, self._index, self._size = batches, index, size
        self._seed, self._keyed = seed, by_sample
        self.before: Context = nullcontext  # around what draws for the order
        self.walk, self.skip = Walk(0, 0), 0
        # Of the newest walk: (low, high, all, digest).
        self.latest: deque[tuple[int, int, int, int]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.latest = deque()
        return self._walk(self.latest, self.walk, self.skip)

    def _walk(self, parts: deque[tuple[int, int, int, int]], walk: Walk, skip: int) -> Iterator[list[Any]]:
        before, number = self.before, 0
        with before():
            batches = iter(self._batches)
        while True:
            with before():
                batch = next(batches, None)
            if batch is None:
                return
            batch = list(batch)
            low, high = part(len(batch), self._index, self._size)
            parts.append((low, high, len(batch), digest(repr(batch).encode())))
            if number >= skip:
                rows, place = batch[low:high] or batch[:1], (self._seed, walk.loader, walk.number, number)
                yield [(i, seed_of(*place, low + row)) for row, i in enumerate(rows)] if self._keyed else rows
            number += 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._batches, name)


class PlacedLoader(ABC):
    """A loader that knows its place in `data`, for checkpoints. Length and attributes are those of `data`."""

    def __init__(
        self, data: Any, current_batch: CurrentBatch, exchange: ScalarExchange, streams: Streams, number: int
    ) -> None:
        self._source, self._batch = data, current_batch
        self._exchange, self._streams = exchange, streams
        self._walk, self._start = Walk(number, -1, over=True), []
        self._going_on: dict[str, Any] | None = None

    @abstractmethod
    def _begun(self, walk: Walk, going_on: dict[str, Any]) -> Iterator[Any]:
        """Yield what is left of a pass, each batch after the current batch has been told of it."""

    def __iter__(self) -> Iterator[Any]:
        with explained():
            going_on, self._going_on = self._going_on or {}, None
            last = self._walk
            walk = self._walk = Walk(last.loader, going_on.get("pass", last.number + 1))
            exhausted = False
            try:
                for batch in self._begun(walk, going_on):
                    self._streams.to_own()
                    yield batch
                    self._streams.to_script()
                exhausted = True
            finally:  # also where the loop leaves a pass early: it begins another then
                if self._batch.ended(walk, exhausted):
                    self._streams.to_script()

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def state(self) -> dict[str, Any]:
        """Where the loop stands in this data, as JSON. What a loop has fetched ahead and not used comes again."""
        walk, about = self._walk, {"loader": self._walk.loader}
        if self._going_on is not None:
            return about | self._going_on
        if walk.over:
            return about | {"pass": walk.number, "own": own_states(generators_of(self._source))}
        place, chain = (walk.used, walk.chain) if walk.used else (walk.fetched, walk.fetched_chain)
        return about | {"pass": walk.number, "place": place, "chain": chain, "random": self._start}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._walk = Walk(state.get("loader", self._walk.loader), state["pass"], over=True)
        self._going_on = state if "place" in state else None
        set_own_states(generators_of(self._source), state.get("own", ()))


class ShardedLoader(PlacedLoader):
    """This rank's parts of the batches of `data`, and what each weighs."""

    def __init__(
        self,
        data: Any,
        current_batch: CurrentBatch,
        exchange: ScalarExchange,
        streams: Streams,
        number: int,
        seed: int,
    ) -> None:
        _refuse(data)
        super().__init__(data, current_batch, exchange, streams, number)
        self._slices: Slices | None = None
        self._data = data
        # A stream has no samples to choose among: its loader's batch sampler says how many come next.
        chosen = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
        if chosen and data.batch_sampler is not None:
            by_sample = draws(data.dataset)
            self._slices = Slices(
                data.batch_sampler, current_batch.index, current_batch.size, seed, by_sample
            )
            self._data = copy.copy(data)
            dataset = BySample(data.dataset) if by_sample else data.dataset
            # A loader guards these names against assignment, for its own iterators may be on their way; this copy's
            # are not.
            vars(self._data).update(batch_sampler=self._slices, dataset=dataset, _iterator=None)

    def _begun(self, walk: Walk, going_on: dict[str, Any]) -> Iterator[Any]:
        self._streams.to_script()
        first = True
        for batch, low, high, count, chain in self._batches(walk, going_on):
            if first:
                self._agree(chain)
            first = False
            self._batch.fetched(batch, low, high, count, walk, chain)
            yield batch

    def skip(self, batches: int) -> None:
        """Leave out the first batches of the next pass, which another program's checkpoint counts as used."""
        self._going_on = {"pass": self._walk.number + 1, "place": batches}

    def _batches(self, walk: Walk, going_on: dict[str, Any]) -> Iterator[tuple[Any, int, int, int, int]]:
        """Yield what is left of this pass: each batch, low, high, its samples on all ranks, the order so far."""
        skip = going_on.get("place", 0)
        before = self._begin(going_on)
        if walk.number:
            keep_workers_waiting(self._data)
        source: Iterator[tuple[Any, int, int, int, int]]
        if self._slices is not None:
            self._slices.before, self._slices.walk, self._slices.skip = before, walk, skip
            with before(), unwatched():  # workers would take a mode along
                batches = iter(self._data)
            source = self._own_rows(batches, skip)
        else:
            with before():
                batches = iter(self._data)
            source = self._whole(batches, before, skip)
        chain = place = 0
        for batch, low, high, count, seen in source:
            chain = digest(f"{chain} {seen}".encode()) if place else seen
            place += 1
            if place == skip and chain != going_on.get("chain", chain):
                raise other_order(self._source, place)
            if place > skip:
                walk.fetched = place - 1
                walk.fetched_chain = chain
                yield batch, low, high, count, chain
        if place < skip and "chain" in going_on:
            raise other_order(self._source, place)

    def _own_rows(self, batches: Iterator[Any], skip: int) -> Iterator[tuple[Any, int, int, int, int]]:
        if self._slices is None:
            return
        parts = self._slices.latest
        for batch in batches:
            while skip:
                skip -= 1
                yield None, *parts.popleft()
            yield batch, *parts.popleft()
        while parts:  # all that is left was used before the checkpoint
            yield None, *parts.popleft()

    def _whole(
        self, batches: Iterator[Any], before: Context, skip: int
    ) -> Iterator[tuple[Any, int, int, int, int]]:
        number = 0
        while True:
            with before():
                batch = next(batches, None)
            if batch is None:
                return
            count = samples_in(batch)
            if not count:
                raise UsageError(
                    f"batch {number} has no tensor with samples along its first dim",
                    where=f"a batch of type {type(batch).__name__}",
                    fix="yield tensors (or tuples, lists, dicts of them) whose dim 0 counts the samples",
                    code="J03",
                )
            low, high = part(count, self._batch.index, self._batch.size)
            whole = high - low == count
            rows = batch if whole else cut(batch, count, *((low, high) if high > low else (0, 1)))
            yield rows, low, high, count, glance_at(batch) if number else digest_of(batch)
            number += 1

    def _begin(self, going_on: dict[str, Any]) -> Context:
        """Random numbers for the order of this pass: rank 0's, or those with which it began before the checkpoint."""
        generators = generators_of(self._source)
        if "random" in going_on:
            self._start = going_on["random"]
            return as_before(self._start, generators)
        for generator in (torch.default_generator, *generators):
            state = self._exchange.from_first(generator.get_state())
            if self._exchange.group.index:
                generator.set_state(state)
        self._start = states_now(generators)
        return nullcontext

    def _agree(self, seen: int) -> None:
        others = self._exchange.gather(seen)
        strangers = [rank for rank, other in enumerate(others) if other != others[0]]
        if strangers:
            raise UsageError(
                f"the data's first batch on rank {strangers[0]} is not the one on rank 0",
                where=type(self._source).__name__,
                likely="each rank shuffles or draws for itself, or has other files",
                fix="the same seed on every rank; `data` yields global batches and is cut here",
                code="J04",
            )


def _refuse(data: Any) -> None:
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        raise UsageError(
            "a data set yields samples, and what is split is batches",
            where=type(data).__name__,
            fix="job.prepare(model, optimizer, DataLoader(dataset, batch_size=...))",
            code="J03",
        )
    sampler = getattr(data, "sampler", None)
    inner = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise UsageError(
            "the loader is split among ranks already",
            where="DistributedSampler",
            fix="leave the DistributedSampler out and let batch_size be the global batch",
            code="J03",
        )
    if not isinstance(data, Iterable):
        raise UsageError(
            f"{type(data).__name__} cannot be walked",
            fix="a DataLoader or any iterable of batches",
            code="J03",
        )

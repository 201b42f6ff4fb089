"""Objects that stay where they were made, references to them, and who still holds one.

The owner counts for each object how many references each worker was lent. A worker whose last reference is collected
gives all of them back. A worker that passes a reference on keeps its own until the receiver has its own from the owner.
"""

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Generic, Literal, Protocol, TypeVar

from unisono_contrib.rpc.current import here
from unisono_contrib.rpc.errors import refused
from unisono_contrib.rpc.exports import exported
from unisono_contrib.rpc.futures import CallFuture
from unisono_contrib.rpc.switchboard import WorkerInfo

T = TypeVar("T")
_ALL = 1 << 62
Way = Literal["sync", "async", "remote"]


class Caller(Protocol):
    """What objects need of their worker."""

    info: WorkerInfo

    exports: Any
    objects: "Objects"

    def call(
        self, to: Any, function: Any, args: Any = (), kwargs: Any = None, timeout: float | None = None
    ) -> CallFuture[Any]: ...
    def remote(
        self, to: Any, function: Any, args: Any = (), kwargs: Any = None, timeout: float | None = None
    ) -> "RRef[Any]": ...
    def ring(self) -> None: ...


class _Entry:
    """An object of this worker. users: references that were lent, by the life of who has them."""

    def __init__(self, life: str) -> None:
        self.value = CallFuture[Any]()
        self.users = Counter([life])


class Handle:
    """All references of this process to one object. lent: how many of them the owner has counted."""

    def __init__(self, number: str, owner: WorkerInfo, lent: list[int]) -> None:
        self.number, self.owner, self.lent = number, owner, lent
        self.created: CallFuture[Any] | None = None


class Objects:
    """What a worker owns and what it holds of others."""

    def __init__(self, worker: Caller) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._unused: deque[tuple[WorkerInfo, str, list[int]]] = (
            deque()
        )  # of which the last reference has gone
        self._next = itertools.count(1).__next__
        self.offers: dict[str, RRef[Any]] = {}

    def __len__(self) -> int:
        """How many objects this worker keeps for itself and others."""
        return len(self._entries)

    def number(self) -> str:
        """A name for one more object, of the whole run."""
        return f"{self._worker.info.life}/{self._next()}"

    def begin(self, number: str, life: str) -> CallFuture[Any]:
        """Keep an object that will be here once the future is done, lent once to the worker of this life."""
        with self._lock:
            if number in self._entries:
                raise ValueError("two objects of one number")
            self._entries[number] = entry = _Entry(life)
        return entry.value

    def value(self, number: str) -> CallFuture[Any]:
        """Raises UsageError Q04 for an object that is not here, or no longer."""
        with self._lock:
            entry = self._entries.get(number)
        if entry is None:
            raise refused(
                f"object {number} is not here any more", "keep an RRef to it", where=self._worker.info.name
            )
        return entry.value

    def handle(self, number: str, owner: WorkerInfo, lent: int) -> Handle:
        """The handle of an object, which the owner has lent `lent` times more."""
        with self._lock:
            handle = self._handles.get(number)
            if handle is None:
                count = [0]
                self._handles[number] = handle = Handle(number, owner, count)
                weakref.finalize(handle, self._collected, owner, number, count).atexit = False
            handle.lent[0] += lent
        return handle

    def lend(self, rref: "RRef[Any]", peer: WorkerInfo) -> Any:
        """What tells a peer of a reference; its owner counts one more."""
        number, owner = rref.handle.number, rref.handle.owner
        lent = 0
        if owner.life == self._worker.info.life and peer.life != owner.life:
            with self._lock:
                self._entries[number].users[peer.life] += 1  # it is there: `rref` holds it
            lent = 1
        return [number, owner.as_json(), lent]

    def borrow(self, reference: Any) -> "RRef[Any]":
        """A reference that came. Where its owner has not counted this worker yet, wait until it has."""
        number, facts, lent = reference
        owner, me = WorkerInfo.read(facts), self._worker.info
        if owner.name == me.name and owner.life != me.life:
            raise refused(
                f"object {number} was of an earlier process of {me.name}", "make it again", where=me.name
            )
        if owner.life == me.life:
            self.hold(number, me.life)
            return RRef.of(self.handle(number, owner, 1), self._worker)
        with self._lock:
            known = self._handles.get(number)
        if known is None and not lent:
            self._worker.call(owner.name, hold, (number, me.life)).wait()
            lent = 1
        return RRef.of(self.handle(number, owner, lent), self._worker)

    def hold(self, number: str, life: str) -> None:
        """Count one more reference of a worker. Raises UsageError Q04."""
        self.value(number)
        with self._lock:
            if (entry := self._entries.get(number)) is not None:
                entry.users[life] += 1

    def dropped(self, number: str, life: str, count: int) -> None:
        """A worker gives references back. The object goes with the last one."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                return
            entry.users[life] -= count
            gone = not any(left > 0 for left in entry.users.values())
            if gone:
                del self._entries[number]

    def left(self, life: str) -> None:
        """A worker has gone, and holds nothing any more."""
        with self._lock:
            numbers = [number for number, entry in self._entries.items() if life in entry.users]
        for number in numbers:
            self.dropped(number, life, _ALL)

    def unused(self) -> Iterator[tuple[WorkerInfo, str, int]]:
        """(owner, number, count) of each object of another worker to which nothing here refers any more."""
        while self._unused:
            owner, number, lent = self._unused.popleft()
            if owner.life == self._worker.info.life:
                self.dropped(number, owner.life, lent[0])
            else:
                yield owner, number, lent[0]

    def _collected(self, owner: WorkerInfo, number: str, lent: list[int]) -> None:
        """Called wherever Python collects a handle: nothing is locked here."""
        self._unused.append((owner, number, lent))
        self._worker.ring()


class RRef(Generic[T]):
    """A reference to an object of a worker, the owner. It can be passed on in calls; the object lives as long as any
    reference to it.

        table = rpc.remote("ps", Table, args=(1000, 16))   # made there
        rows = table.rpc_sync().pull([3, 5])               # a method, there
        local = RRef(model)                                # an object of this worker, for others
    """

    handle: Handle
    _worker: Caller

    def __init__(self, value: T) -> None:
        worker = here()
        objects: Objects = worker.objects
        number = objects.number()
        objects.begin(number, worker.info.life).set_result(value)
        self.handle, self._worker = objects.handle(number, worker.info, 1), worker

    @classmethod
    def of(cls, handle: Handle, worker: Caller) -> "RRef[Any]":
        """One more reference of this process."""
        rref = cls.__new__(cls)
        rref.handle, rref._worker = handle, worker
        return rref

    def __repr__(self) -> str:
        return f"RRef({self.handle.number} of {self.owner_name()})"

    def owner(self) -> WorkerInfo:
        return self.handle.owner

    def owner_name(self) -> str:
        return self.handle.owner.name

    def is_owner(self) -> bool:
        """Whether the object is of this process."""
        return self.handle.owner.life == self._worker.info.life

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has made the object."""
        created = self.handle.created
        return created is None or (created.done() and created.exception() is None)

    def local_value(self) -> T:
        """The object itself, on its owner; waits until it is made. Raises UsageError Q04 elsewhere."""
        if not self.is_owner():
            what = f"the object is of worker {self.owner_name()}"
            raise refused(what, "to_here() for a copy, rpc_sync() for its methods", where="RRef.local_value")
        return self._worker.objects.value(self.handle.number).wait()

    def to_here(self, timeout: float | None = None) -> T:
        """A copy of a value of JSON and tensors; the object itself on its owner. Raises what making it has raised."""
        if self.is_owner():
            return self.local_value()
        return self._worker.call(self.owner_name(), value_of, (self,), timeout=timeout).wait()

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """`rref.rpc_sync().method(x)` calls a public method on the owner and returns its result."""
        return _Methods(self, "sync", timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """As `rpc_sync`, but returns a CallFuture."""
        return _Methods(self, "async", timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """As `rpc_sync`, but the result stays on the owner; returns an RRef to it."""
        return _Methods(self, "remote", timeout)

    def call(self, way: Way, timeout: float | None, name: str, args: Any, kwargs: Any) -> Any:
        """Call a method of the object."""
        begin = self._worker.remote if way == "remote" else self._worker.call
        under_way: Any = begin(self.owner_name(), invoke, (self, name, args, kwargs), timeout=timeout)
        return under_way.wait() if way == "sync" else under_way


class _Methods:
    """The methods of an object elsewhere."""

    def __init__(self, rref: RRef[Any], way: Way, timeout: float | None) -> None:
        self._rref, self._timeout = rref, timeout
        self._way: Way = way

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._rref.call(self._way, self._timeout, name, args, kwargs)


def offer(name: str, value: Any) -> RRef[Any]:
    """Let other workers find an object of this worker by a name, as long as this process lives; a later one of the same
    name takes its place. They get its reference by `find`. Returns the reference."""
    rref = RRef(value)
    here().objects.offers[name] = rref
    return rref


def find(worker: str, name: str, timeout: float | None = None) -> RRef[Any]:
    """The reference of what a worker offers under a name. timeout: seconds; that of `init` if None. Raises UsageError
    Q04 where it offers no such thing; PeerLost, CallTimeout."""
    return here().call(worker, offered, (name,), timeout=timeout).wait()


@exported
def offered(name: str) -> RRef[Any]:
    """What this worker offers under a name."""
    rref = here().objects.offers.get(name)
    if rref is None:
        raise refused(f"nothing is offered as {name} here", "rpc.offer(name, object)", where=here().info.name)
    return rref


@exported
def value_of(rref: RRef[Any]) -> CallFuture[Any]:
    """An object's value, once it is made."""
    return here().objects.value(rref.handle.number)


@exported
def invoke(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of an object of this worker."""
    return rref._worker.exports.method(rref.local_value(), name)(*args, **kwargs)


@exported
def hold(number: str, life: str) -> None:
    """Count one more reference."""
    here().objects.hold(number, life)

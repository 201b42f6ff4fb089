"""A worker: calls to others, calls of others, and whom it waits for at the end."""

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unisono.launch.agent import call as dial
from unisono_contrib.rpc import errors
from unisono_contrib.rpc.autograd import GradientContexts
from unisono_contrib.rpc.current import HERE
from unisono_contrib.rpc.exports import Exports, path_of
from unisono_contrib.rpc.futures import CallFuture
from unisono_contrib.rpc.meeting import CallMeeting
from unisono_contrib.rpc.messages import Message, frames_of
from unisono_contrib.rpc.objects import Objects, RRef
from unisono_contrib.rpc.pending import PendingCalls
from unisono_contrib.rpc.pool import CallPool
from unisono_contrib.rpc.switchboard import Connection, Switchboard, WorkerInfo, _PeerListener
from unisono_contrib.rpc.values import PackedValue, pack, unpack

Target = str | int | WorkerInfo
Head = dict[str, Any]


class RpcWorker:
    """This process among the workers of a run. `rpc.init` makes it; functions of `unisono.rpc` act on it.

    info: its own name, rank and host. workers: all of them, by rank."""

    def __init__(
        self, meeting: CallMeeting, name: str, modules: Sequence[str], threads: int, timeout: float, silence: float,
        tls: bool,
    ) -> None:  # fmt: skip
        self._meeting, self._timeout, name = meeting, timeout, name or meeting.name
        self.workers, addresses = meeting.enter(name, timeout)
        self.info = self.workers[meeting.rank]
        self.exports = Exports(modules)
        self.contexts = GradientContexts(self.info)
        self.objects = Objects(self)
        self._pool = CallPool(threads, lambda: HERE.set(self))
        self._pending = PendingCalls()
        self._lines: dict[str, Connection] = {}  # on which this worker calls, by the peer's name
        self._routes: dict[str, Connection] = {}  # to whom this worker has a connection, by life
        self._dialing: dict[str, threading.Lock] = {info.name: threading.Lock() for info in self.workers}
        self._pins: dict[tuple[Connection, int], Sequence[RRef]] = {}
        self._over: set[str] = set()  # lives of those who call nobody any more
        self._news = threading.Condition()
        self._closed = False
        everywhere = addresses[0] if addresses == ["127.0.0.1"] else "0.0.0.0"  # behind the token
        listener = _PeerListener.at(everywhere, tls, token=meeting.token)
        self._board = Switchboard(listener, silence, self._heard, self._ended, self._due)
        self._board.start()
        door = {"addresses": addresses, "port": listener.port, "certificate": listener.certificate}
        meeting.publish(name, {**door, **self.info.as_json()})

    @property
    def closed(self) -> bool:
        """Whether this worker has left."""
        return self._closed

    # Calls to others.

    def call(
        self, to: Target, function: Callable[..., Any] | str, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, timeout: float | None = None, rref: str = "",
        context: int | None = None,
    ) -> CallFuture[Any]:  # fmt: skip
        """Begin a call. rref: the name under which the result stays there. context: of distributed autograd, the one of
        this thread if None, none if 0. Raises UsageError for what cannot be called so; PeerLost and CallTimeout come
        with the result.
        """
        if self._closed:
            raise errors.no_member("this worker has left", "calls before rpc.shutdown()")
        info, path = self.find(to), path_of(function)
        context = self.contexts.here() if context is None else context
        if info.life == self.info.life:
            return self._call_here(path, args, dict(kwargs or {}), rref, context)
        try:
            connection = self._line(info)
        except (errors.PeerLost, errors.CallTimeout) as error:
            (future := CallFuture[Any]()).set_exception(error)
            return future
        sends = context if torch.is_grad_enabled() else 0
        packed = self._packed((tuple(args), dict(kwargs or {})), connection.peer, sends)
        future = CallFuture[Any](packed.rrefs)
        seconds = self._timeout if timeout is None else timeout
        number = self._pending.add(connection, future, path, context, seconds)
        self._send(connection, {"id": number, "call": path, "rref": rref, "context": context}, packed)
        if connection.ended:  # before the call was noted, perhaps
            self._pending.fail(connection, self._lost(connection))
        return future

    def remote(
        self, to: Target, function: Callable[..., Any] | str, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, timeout: float | None = None,
    ) -> RRef[Any]:  # fmt: skip
        """Begin a call whose result stays there; a reference to it. Raises PeerLost, CallTimeout, UsageError."""
        info = self.find(to)
        owner = self.info if info.life == self.info.life else self._line(info).peer
        number = self.objects.number()
        rref = RRef.of(self.objects.handle(number, owner, 1), self)
        rref.handle.created = self.call(owner.name, function, args, kwargs, timeout, number)
        return rref

    def _call_here(
        self, path: str, args: Sequence[Any], kwargs: dict[str, Any], rref: str, context: int
    ) -> CallFuture[Any]:
        future = CallFuture[Any]()
        result = self.objects.begin(rref, self.info.life) if rref else future
        self._pool.submit(lambda: self._run(path, lambda: (args, kwargs), context, self.info, result))
        if rref:
            result.add_done_callback(lambda done: _hand_on(done, future, stays=True))
        return future

    def find(self, to: Target) -> WorkerInfo:
        """A worker by name, rank or itself. Raises UsageError Q06."""
        for info in self.workers:
            if to in (info.name, info) or (type(to) is int and to == info.rank):
                return info
        names = ", ".join(info.name for info in self.workers)
        raise errors.no_member(f"there is no worker {to!r}", f"one of: {names}")

    def _line(self, info: WorkerInfo) -> Connection:
        """The connection on which this worker calls another one. Raises PeerLost, CallTimeout."""
        with self._dialing[info.name]:
            known = self._lines.get(info.name)
            if known is not None and not known.ended:
                return known
            door = self._meeting.door(info.name, self._timeout)
            if known is not None and door["life"] == known.peer.life:  # nobody has come in its place
                raise self._lost(known)
            if self._closed:
                raise errors.PeerLost(info.name, info.rank, info.host, "this worker has left")
            peer, why = WorkerInfo.read(door), "nobody answers"
            for address in door["addresses"]:
                place = {"address": address, "port": door["port"], "certificate": door["certificate"]}
                try:
                    link = dial({**place, "token": self._meeting.token}, self.info.as_json())
                except OSError as error:
                    why = f"{address}:{door['port']}: {error}"
                    continue
                self._lines[info.name] = connection = Connection(link, peer, calls=True)
                self._board.send(connection)
                return connection
            raise errors.PeerLost(peer.name, peer.rank, peer.host, why)

    def _lost(self, connection: Connection) -> errors.PeerLost:
        peer = connection.peer
        return errors.PeerLost(peer.name, peer.rank, peer.host, connection.ended)

    def _send(self, connection: Connection, head: Head, packed: PackedValue) -> None:
        body = {"body": packed.tree, "rrefs": packed.references, "sends": packed.sends}
        self._board.send(connection, frames_of({**head, **body}, packed.tensors))

    def _packed(self, value: Any, peer: WorkerInfo, context: int) -> PackedValue:
        """A value as it travels to a peer, noted by a context of distributed autograd. Raises UsageError Q05."""
        tensors, rrefs = list[Tensor](), list[RRef]()
        tree = pack(value, tensors, rrefs, lambda part: isinstance(part, RRef))
        sends = self.contexts.sending(context, tensors, peer)
        return PackedValue(tree, tensors, rrefs, [self.objects.lend(rref, peer) for rref in rrefs], sends)

    def _unpacked(self, head: Head, tensors: list[Tensor], peer: WorkerInfo, context: int) -> Any:
        """The value of a message. It waits for the owners of RRefs that are new here."""
        self.contexts.receiving(context, head["sends"], tensors, peer)
        rrefs = [self.objects.borrow(reference) for reference in head["rrefs"]]
        return unpack(head["body"], tensors, rrefs)

    # Calls of others, on the switchboard's thread; nothing here waits.

    def _heard(self, connection: Connection, message: Message) -> None:
        head, tensors = message
        peer = connection.peer
        self._routes[peer.life] = connection
        if "reply" in head:
            self._answered(connection, head, tensors)
        elif "unpin" in head:
            self._pins.pop((connection, head["unpin"]), None)
        elif "drop" in head:
            self.objects.dropped(head["drop"], peer.life, head["count"])
        elif "over" in head:
            with self._news:
                self._over.add(peer.life)
                self._news.notify_all()
        else:
            number, context = head["id"], head["context"]
            stays = bool(head["rref"])
            result = self.objects.begin(head["rref"], peer.life) if stays else CallFuture[Any]()
            result.add_done_callback(lambda done: self._reply(connection, number, context, done, stays))
            values = lambda: self._unpacked(head, tensors, peer, context)
            self._pool.submit(lambda: self._run(head["call"], values, context, peer, result))

    def _run(
        self, path: str, values: Callable[[], Any], context: int, caller: WorkerInfo, future: CallFuture[Any]
    ) -> None:
        """Run a function for a caller. One that returns a CallFuture is over when that is."""
        try:
            with self.contexts.entered(context, caller):
                args, kwargs = values()
                result = self.exports.find(path)(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
            return
        if isinstance(result, CallFuture):
            result.add_done_callback(lambda done: _hand_on(done, future))
        else:
            future.set_result(result)

    def _reply(
        self, connection: Connection, number: int, context: int, future: CallFuture[Any], stays: bool
    ) -> None:
        """Send what came of a call. stays: the result is an object that stays here; its error is told nevertheless."""
        head: Head = {"reply": number}
        try:
            if (error := future.exception()) is not None:
                raise error
            packed = self._packed(None if stays else future.value(), connection.peer, context)
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            self._board.send(connection, frames_of({**head, "error": errors.describe(error, trace)}))
            return
        if packed.rrefs:
            self._pins[connection, number] = packed.rrefs
        self._send(connection, head, packed)

    def _answered(self, connection: Connection, head: Head, tensors: list[Tensor]) -> None:
        call = self._pending.pop(head["reply"])
        if call is None:  # its time was over
            return
        if (record := head.get("error")) is not None:
            peer = connection.peer
            call.future.set_exception(errors.restore(record, peer.name, peer.rank, peer.host))
            return

        def take() -> None:
            try:
                value = self._unpacked(head, tensors, connection.peer, call.context)
            except BaseException as error:
                call.future.set_exception(error)
                return
            finally:
                if head["rrefs"]:
                    self._board.send(connection, frames_of({"unpin": head["reply"]}))
            call.future.set_result(value)

        if head["rrefs"]:
            self._pool.submit(take)  # which may have to ask their owners
        else:
            take()

    def _ended(self, connection: Connection) -> None:
        """A connection is over: all calls over it fail at once."""
        if connection.calls:
            self._pending.fail(connection, self._lost(connection))
        if self._routes.get(connection.peer.life) is connection:
            del self._routes[connection.peer.life]
        self.objects.left(connection.peer.life)
        for key in [key for key in self._pins if key[0] is connection]:
            self._pins.pop(key, None)
        with self._news:
            self._news.notify_all()

    def _due(self) -> float:
        for owner, number, count in self.objects.unused():
            route = self._routes.get(owner.life)  # whoever opened it
            if route is not None:
                self._board.send(route, frames_of({"drop": number, "count": count}))
        return self._pending.expire()

    def ring(self) -> None:
        """Have `_due` called soon; safe wherever an object is collected."""
        self._board.ring()

    # The end.

    def shutdown(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leave. graceful: go on to answer until all workers have called this, or have gone; else leave now.

        Raises CallTimeout where one has not called it after `timeout` seconds; for ever if None."""
        if self._closed:
            return
        try:
            if graceful:
                self._leave_together(timeout)
        finally:
            self._closed = True
            self._board.stop()
            self._pool.close()

    def _leave_together(self, timeout: float | None) -> None:
        for future in self._pending.futures():  # who is asked must not leave before it has answered
            with suppress(Exception):
                future.wait(timeout)
        others = [info for info in self.workers if info.life != self.info.life]
        lines = dict[str, Connection]()
        for info in others:
            with suppress(errors.PeerLost):
                lines[info.name] = self._line(info)
                self._board.send(lines[info.name], frames_of({"over": True}))
        until = None if timeout is None else time.monotonic() + timeout

        def missing() -> list[str]:
            return [
                name for name, line in lines.items() if not line.ended and line.peer.life not in self._over
            ]

        with self._news:
            while names := missing():
                if until is not None and time.monotonic() > until:
                    fix = "see what it does; shutdown(graceful=False) leaves without it"
                    raise errors.CallTimeout(f"{', '.join(names)} did not end", where="rpc.shutdown", fix=fix)
                self._news.wait(0.2 if until is not None else 1.0)


def _hand_on(done: CallFuture[Any], future: CallFuture[Any], stays: bool = False) -> None:
    """End a future as another one has. stays: without its result."""
    if (error := done.exception()) is None:
        future.set_result(None if stays else done.value())
    else:
        future.set_exception(error)

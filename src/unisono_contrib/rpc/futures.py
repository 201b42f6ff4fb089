"""A result that comes later, with the methods of torch.futures.Future; a Ctrl-C interrupts who waits for it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CallFuture(Generic[T]):
    """The result of a call. `wait()` returns it, or raises what the call has raised.

    future = rpc.rpc_async("ps", pull)
    weights = future.wait()
    """

    def __init__(self, keeps: Sequence[Any] = ()) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], Any]] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self._keeps = keeps  # references that must outlive the call

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """timeout: seconds; for ever if None, in which case the call's own timeout counts. Raises TimeoutError."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"no result after {timeout:g} s")
        return self.value()

    def value(self) -> T:
        """The result of a call that is over. Raises what the call has raised; RuntimeError while it runs."""
        if not self._done.is_set():
            raise RuntimeError("the call is not over yet")
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self) -> BaseException | None:
        """What the call has raised; None for a result, or while it runs."""
        return self._error

    def set_result(self, value: T) -> None:
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        """The first end counts: an answer may come after its time is over."""
        with self._lock:
            if self._done.is_set():
                return
            self._value, self._error, self._keeps = value, error, ()
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[["CallFuture[T]"], Any]) -> None:
        """Have `callback(future)` called when the call is over; at once if it is. It must not wait for other calls."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def then(self, function: Callable[["CallFuture[T]"], Any]) -> "CallFuture[Any]":
        """A future of `function(this future)`, which runs once this one is over."""
        after = CallFuture[Any]()

        def go_on(before: "CallFuture[T]") -> None:
            try:
                after.set_result(function(before))
            except BaseException as error:
                after.set_exception(error)

        self.add_done_callback(go_on)
        return after


def collect_all(futures: Sequence[CallFuture[Any]]) -> CallFuture[list[Any]]:
    """A future of all results, in order. It fails as soon as one does."""
    whole, left, lock = CallFuture[list[Any]](), [len(futures)], threading.Lock()

    def over(future: CallFuture[Any]) -> None:
        if (error := future.exception()) is not None:
            whole.set_exception(error)
            return
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            whole.set_result([each.value() for each in futures])

    if not futures:
        whole.set_result([])
    for future in futures:
        future.add_done_callback(over)
    return whole


def wait_all(futures: Sequence[CallFuture[Any]]) -> list[Any]:
    """All results, in order. Raises as soon as one call has failed."""
    return collect_all(futures).wait()

"""What a remote call can end in, besides its result."""

import builtins
from functools import cache
from typing import Any, ClassVar

from unisono.spec.errors import PeerGone, UnisonoError, UsageError, UserCodeError

_TRACE = 20_000  # letters of a traceback that travel


class PeerLost(PeerGone):
    """A worker has gone: it was killed, its host is silent, or it left early. `name`, `rank` and `host` say which.

    Every call that waits for this worker raises it at once.
    """

    exit = 1
    default_code: ClassVar[str] = "Q01"

    def __init__(self, name: str, rank: int, host: str, why: str) -> None:
        fix = "read the error of that worker; a new process may join under its name"
        super().__init__(f"worker {name} is gone ({why})", rank=rank, host=host, fix=fix)
        self.name, self.why = name, why


class RemoteError(UserCodeError):
    """A function raised on another worker. `remote_type` is the exception's class there, `remote_trace` its traceback.

    It is an instance of that class too if Python has it built in: `except ValueError` catches a remote ValueError.
    """

    default_code: ClassVar[str] = "Q02"
    remote_type: str = ""
    remote_trace: str = ""


class CallTimeout(UnisonoError, TimeoutError):
    """A worker lives, and has not answered in time."""

    exit = 6
    default_code: ClassVar[str] = "Q03"


class NoExperts(UnisonoError):
    """Of the experts of a layer none answered for some sample; the last one's error is its cause."""

    exit = 1
    default_code: ClassVar[str] = "Q07"

    def __init__(self, experts: int, timeout: float) -> None:
        super().__init__(
            f"none of {experts} experts answered within {timeout:g} s",
            where="unisono.rpc",
            fix="start the peers that offer them, or let them have more time (timeout)",
        )


def refused(what: str, fix: str, where: str = "") -> UsageError:
    """Q04: a function that a worker does not export, or an object that it no longer has."""
    return UsageError(what, where=where, fix=fix, code="Q04")


def not_sendable(what: str, where: str = "") -> UsageError:
    """Q05: a value that does not travel."""
    fix = "JSON values, bytes, tensors, RRefs, in lists, tuples, dicts; an object stays, behind an RRef"
    return UsageError(what, where=where, fix=fix, code="Q05")


def no_member(what: str, fix: str) -> UsageError:
    """Q06: a worker that is not there, or none here."""
    return UsageError(what, where="unisono.rpc", fix=fix, code="Q06")


def describe(error: BaseException, trace: str) -> dict[str, Any]:
    """An error as JSON, for the worker that waits."""
    record = {"type": type(error).__name__, "what": str(error)[:_TRACE], "trace": trace[-_TRACE:]}
    if isinstance(error, PeerLost):
        return record | {"lost": [error.name, error.rank, error.host, error.why]}
    if isinstance(error, UsageError):
        return record | {"usage": [error.what, error.where, error.fix, error.code]}
    return record


def restore(record: dict[str, Any], worker: str, rank: int, host: str) -> UnisonoError:
    """The error that a record stands for, on the worker that waited. worker, rank, host: where it was raised."""
    if lost := record.get("lost"):
        return PeerLost(*lost)
    if usage := record.get("usage"):
        what, where, fix, code = usage
        return UsageError(what, where=where, fix=fix, code=code, rank=rank, host=host)
    name, what, trace = record["type"], record["what"], record["trace"]
    first = what.strip().splitlines()[:1]
    text = f"{name}: {first[0]}" if first else name
    error = _class_of(name)(f"{text}, on worker {worker}", where=f"worker {worker}", rank=rank, host=host)
    error.remote_type, error.remote_trace = name, trace
    error.add_note(f"Traceback of worker {worker}:\n{trace}")
    return error


@cache
def _class_of(name: str) -> type[RemoteError]:
    """RemoteError that is also the built-in exception of this name, where there is one and both fit in one class."""
    builtin = getattr(builtins, name, None)
    if not (isinstance(builtin, type) and issubclass(builtin, Exception)):
        return RemoteError
    try:
        return type("RemoteError", (RemoteError, builtin), {})
    except TypeError:  # their layouts conflict
        return RemoteError

"""Errors on their way from a rank to the one place that reports them. No torch."""

from dataclasses import asdict
from typing import Any

from unisono.spec import errors, frames

Record = dict[str, Any]

ECHO = "another process of the run went away first"
"""The likely cause of an error that only echoes another rank's."""

# What a healthy rank says when another one has left. Such words never name the culprit.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "the launcher has gone",
    "connection was likely closed",
)
_TOLD = ("what", "where", "likely", "fix", "code", "rank", "host")
EMPTY: Record = {
    **dict.fromkeys(_TOLD, ""), "code": "R01", "rank": None, "kind": "UserCodeError", "shown": "", "trace": "",
    "shared": False, "echo": False,
}  # fmt: skip
"""What a record says where it says nothing."""


def describe(error: BaseException) -> Record:
    """An error as plain data, from inside its `except` block."""
    is_ours = (
        isinstance(error, errors.UnisonoError)
        or frames.is_crowded(error)
        or frames.at_fault(error) != ("", "")
    )
    gone = isinstance(error, errors.PeerGone)
    echo = gone or (not is_ours and is_echo(type(error).__name__, str(error)))
    if gone:
        known = frames.known(error)
    elif echo and "timed out" in str(error).lower():  # the watchdog itself was kept from speaking
        likely = "a rank is stopped or slow: look at the others"
        known = errors.HangError(frames.words(error), where=frames.place(error), likely=likely)
    elif echo:
        known = errors.UserCodeError(frames.words(error), where=frames.place(error), likely=ECHO, code="R03")
    else:
        known = frames.known(error)
    record: Record = {
        "kind": type(known).__name__,
        **{key: getattr(known, key) for key in _TOLD},
        "where": known.where or frames.place(error),
        "shown": known.shown,
        "trace": known.trace or frames.whole(error),
        "shared": known.shared,
        "echo": echo,
    }
    if isinstance(known, errors.ConfigProblems):
        record["problems"] = [asdict(problem) for problem in known.problems]
    return record


def is_echo(type_name: str, words: str) -> bool:
    """True for the failures that only mean "somebody else is gone"."""
    if type_name in ("DistNetworkError", "DistStoreError"):
        return True
    return type_name in (
        "RuntimeError",
        "DistBackendError",
        "ConnectionError",
        "ConnectionResetError",
    ) and any(echo in words.lower() for echo in _ECHOES)


def revive(record: Record, rank: int | None, host: str) -> errors.UnisonoError:
    """The error as the supervisor raises it, of rank `rank` unless it names another."""
    if "problems" in record:
        error: errors.UnisonoError = errors.ConfigProblems(
            [errors.Problem(**problem) for problem in record["problems"]]
        )
    else:
        kind = getattr(errors, record["kind"], None)
        if not (isinstance(kind, type) and issubclass(kind, errors.UnisonoError)):
            kind = errors.UserCodeError  # a kind of its own, made in a rank
        named = {} if record["rank"] is not None else {"rank": rank, "host": host}
        error = kind(**{key: record[key] for key in _TOLD} | named)
        error.shown, error.trace = record["shown"], record["trace"] if record["shown"] else ""
    error.shared = record["shared"]
    return error

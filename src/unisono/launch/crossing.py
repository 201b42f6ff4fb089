"""Errors on their way from a rank to the one place that reports them. No torch."""

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.spec import errors

Record = dict[str, Any]

_PACKAGE = str(Path(errors.__file__).parents[1])
_LAUNCH = str(Path(__file__).parent)
FOREIGN = (_PACKAGE, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")

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
_NO_MEMORY = ("can't allocate memory", "out of memory", "cannot allocate memory")


def place(tb: TracebackType | None) -> str:
    """`file:line in function` of the innermost frame that is the user's, else of the innermost one."""
    frames = traceback.extract_tb(tb)
    if not frames:
        return ""
    own = [f for f in frames if not f.filename.startswith(FOREIGN)]
    # Users' programs may live inside an environment's own folders; then any frame outside us is better than none.
    chosen = (own or [f for f in frames if not f.filename.startswith(_LAUNCH)] or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno} in {chosen.name}"


def describe(error: BaseException) -> Record:
    """An error as plain data, from inside its `except` block."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename.startswith(_LAUNCH):
        tb = tb.tb_next
    words = str(error)
    record: Record = {
        "type": type(error).__name__,
        "what": words,
        "place": place(error.__traceback__),
        "traceback": "".join(traceback.format_exception(type(error), error, tb))[-20_000:],
        "shared": getattr(error, "shared", False),
        "echo": not isinstance(error, errors.UnisonoError) and is_echo(type(error).__name__, words),
    }
    if isinstance(error, errors.UnisonoError):
        record["ours"] = {
            "where": error.where,
            "likely": error.likely,
            "fix": error.fix,
            "code": error.code,
            "rank": error.rank,
            "host": error.host,
        }
    if isinstance(error, errors.ConfigProblems):
        record["problems"] = [
            {"code": p.code, "what": p.what, "where": p.where, "fix": p.fix, "likely": p.likely}
            for p in error.problems
        ]
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
    """The error as the supervisor raises it: ours keep class, code and exit; others become UserCodeError."""
    error = _revived(record, rank, host)
    error.shared = bool(record.get("shared"))
    return error


def _revived(record: Record, rank: int | None, host: str) -> errors.UnisonoError:
    if "problems" in record:
        return errors.ConfigProblems([errors.Problem(**one) for one in record["problems"]])
    ours = record.get("ours")
    if ours is not None:
        kind = getattr(errors, record["type"], None)
        if not (isinstance(kind, type) and issubclass(kind, errors.UnisonoError)):
            kind = errors.UserCodeError
        known = {**ours, "where": ours["where"] or record["place"]}
        if known["rank"] is None:
            known |= {"rank": rank, "host": host}
        return kind(record["what"], **known)
    words = f"{record['type']}: {record['what']}" if record["what"] else record["type"]
    if record["type"] in ("OutOfMemoryError", "MemoryError") or any(
        sign in record["what"].lower() for sign in _NO_MEMORY
    ):
        return errors.Infeasible(
            _first_line(words),
            where=record["place"],
            likely="the plan does not fit this machine's memory",
            fix="a smaller train.micro_batch, recompute=full, or shard=N in the plan",
            rank=rank,
            host=host,
        )
    likely = ECHO if record["echo"] else ""
    return errors.UserCodeError(
        _first_line(words), where=record["place"], likely=likely, rank=rank, host=host, code="R01"
    )


def _first_line(words: str, most: int = 300) -> str:
    line = words.strip().splitlines()[0] if words.strip() else words
    return line if len(line) <= most else line[: most - 3] + "..."

"""Whose line raised, a user's or ours, and the error of ours that stands for any exception. Standard library only.

A line is a user's unless its file belongs to this package, to Python's library or to an installed one. A file that we
loaded by its path (a recipe, a model, a sink) is a user's wherever it lies.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from unisono.spec import errors

_PACKAGE = str(Path(errors.__file__).parents[1])
FOREIGN = (
    _PACKAGE + os.sep,
    f"{_PACKAGE}_contrib{os.sep}",
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<frozen",
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_LOADED = "unisono_"  # how modules are called that we load by path: unisono_model_mine
_NO_MEMORY = ("can't allocate memory", "out of memory", "cannot allocate memory")
# What is said where a variable is at fault.
_ABOUT = (
    ("Unable to find address for", "GLOO_SOCKET_IFNAME"),
    ("Unable to find interface", "GLOO_SOCKET_IFNAME"),
    ("unsupported gloo device", "GLOO_DEVICE_TRANSPORT"),
    ("no socket interface found", "NCCL_SOCKET_IFNAME"),
)
_NAMED = re.compile(r"value of ([A-Z]+(?:_[A-Z]+)+) must be")
_SAID = "or a value that it says"
_DEVICE = "or a device that `ip -brief address` lists with an address"
_OTHERS = {"GLOO_SOCKET_IFNAME": _DEVICE, "NCCL_SOCKET_IFNAME": _DEVICE, "GLOO_DEVICE_TRANSPORT": "or TCP"}
_SHOWN = 2
"""Lines of a user's that the screen shows, each with its source below; `error.json` has all."""


def is_foreign(file: str) -> bool:
    """Whether no user wrote this file."""
    return file.startswith(FOREIGN) or any(part in file for part in _INSTALLED)


def users(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's lines that the error came through, the innermost last."""
    frames = []
    for (frame, _), summary in zip(
        traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True
    ):
        stands_for = getattr(frame.f_locals.get("self"), "users_line", None)
        if stands_for is not None and (line := stands_for(summary.line or "")):  # of a traced module
            file, _, at = line.partition(" in ")[0].rpartition(":")
            frames.append(traceback.FrameSummary(file, int(at), line.rpartition(" in ")[2]))
            continue
        module = str(frame.f_globals.get("__name__", ""))
        ours = is_foreign(summary.filename) or module.startswith(("unisono.", "unisono_contrib."))
        if module.startswith(_LOADED) or not ours:
            frames.append(summary)
    if isinstance(error, SyntaxError) and error.filename and not is_foreign(error.filename):
        line = (error.text or "").strip()
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 1, "<module>", line=line))
    return frames


def place(error: BaseException) -> str:
    """`file:line in function` of the innermost line of the user's, or of the innermost of all; "" without any."""
    frames: Sequence[traceback.FrameSummary] = users(error) or traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def shown(error: BaseException) -> str:
    """The traceback as a screen shows it: the user's innermost lines and the error, six lines at most."""
    lines = ["Traceback (your lines; error.json has all):"]
    for frame in users(error)[-_SHOWN:]:
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    return "\n".join([*lines, words(error)])


def words(error: BaseException, most: int = 300) -> str:
    """`ValueError: the first line of what it says`."""
    name, said = type(error).__name__, str(error).strip()
    line = f"{name}: {said.splitlines()[0]}" if said else name
    return line if len(line) <= most else line[: most - 3] + "..."


def of_user(error: BaseException, what: str = "", where: str = "") -> errors.UserCodeError:
    """R01 for what a user's code raised. what: who raised it, as "the model function". where: if no line of the user's
    is on the stack, as for a call with the wrong arguments."""
    fix = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        fix = f"pip install {error.name}, in the environment of this Python"
    said = f"{what} raised {words(error)}" if what else words(error)
    wrapped = errors.UserCodeError(
        said, where=(place(error) if users(error) else where) or place(error), fix=fix
    )
    wrapped.shown, wrapped.trace = shown(error), whole(error)
    return wrapped


def known(error: BaseException) -> errors.UnisonoError:
    """The error of ours that stands for any exception."""
    match error:
        case errors.UnisonoError():
            return error
        case KeyboardInterrupt():
            return errors.Interrupted("stopped by Ctrl-C")
        case _ if is_memory(error):
            likely = "the plan does not fit this machine's memory"
            fix = "a smaller train.micro_batch, recompute=full, or shard=N in the plan"
            return errors.Infeasible(words(error), where=place(error), likely=likely, fix=fix)
        case _ if at_fault(error)[0]:
            name, why = at_fault(error)
            if why.endswith(": lo"):  # ranks of one host meet there, whatever the variable says
                what = f"the loopback device lo is down: {why}"
                return errors.UsageError(what, where="lo", fix="ip link set lo up", code="L13")
            what, fix = (
                f"the variable {name} is wrong here: {why}",
                f"unset {name}, {_OTHERS.get(name, _SAID)}",
            )
            return errors.UsageError(what, where=name, fix=fix, code="L13")
        case _ if is_crowded(error):
            what, fix = "too many open files", "ulimit -n 4096, or fewer ranks"
            return errors.UsageError(what, where=place(error), fix=fix, code="E02")
        case _ if users(error):
            return of_user(error)
        case ModuleNotFoundError() if error.name and not error.name.startswith("unisono"):
            fix = f"make setup, or pip install {error.name}"
            what = f"the module {error.name} is not installed"
            return errors.UsageError(what, where="this Python", fix=fix, code="E01")
        case OSError() if error.filename is not None and not isinstance(error, BlockingIOError):
            what = f"{error.strerror or type(error).__name__}: {error.filename}"
            fix = "check the path, its rights and the disk"
            return errors.UsageError(what, where=str(error.filename), fix=fix, code="E02")
    likely = "a fault of unisono itself; the traceback above says where"
    wrapped = errors.UnisonoError(
        words(error), where=place(error), likely=likely, fix="report it, with the traceback"
    )
    wrapped.shown = wrapped.trace = whole(error)
    return wrapped


def is_crowded(error: BaseException) -> bool:
    """Whether the system gives no file or socket more, in its own words or in Gloo's."""
    return "too many open files" in str(error).lower()


def at_fault(error: BaseException) -> tuple[str, str]:
    """(the variable of the environment that torch's error is about, what it says), in its own words, Gloo's or NCCL's;
    ("", "") if none."""
    for line in str(error).splitlines():
        if named := _NAMED.search(line):
            return named[1], line
        for sign, name in _ABOUT:
            if sign in line:
                return name, line[line.index(sign) :]
    return "", ""


def is_memory(error: BaseException) -> bool:
    """Python's and torch's ways to say that there is no memory."""
    said = str(error).lower()
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or any(
        sign in said for sign in _NO_MEMORY
    )


def whole(error: BaseException, most: int = 20_000) -> str:
    """The whole traceback, with those of its causes."""
    return "".join(traceback.format_exception(error)).rstrip()[-most:]

"""Whose fault it is: decided by whose lines the error came through."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from unisono.launch import error_record
from unisono.spec.errors import Infeasible, Interrupted, UnisonoError, UsageError, UserCodeError
from unisono.spec.frames import at_fault, known, place, users

USERS = """\
def outer(call):
    return inner(call)

def inner(call):
    return call()

def deep(n):
    return deep(n - 1) if n else 1 / 0
"""


@pytest.fixture
def mine(tmp_path: Path):
    """A user's module, in a file of the user's."""
    (tmp_path / "mine.py").write_text(USERS)
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caught(call) -> Exception:
    try:
        call()
    except Exception as error:
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # this file is no user's here
        return error
    raise AssertionError("nothing was raised")


def test_an_error_below_a_users_line_is_the_users(mine) -> None:
    told = known(caught(lambda: mine.outer(json.loads)))
    assert isinstance(told, UserCodeError) and (told.code, told.exit) == ("R01", 1)
    assert told.where.endswith("mine.py:5 in inner"), "the innermost line of the user's, not json's own"
    assert told.what.startswith("TypeError: ")


def test_without_a_users_line_it_is_ours() -> None:
    told = known(_without_frames(ZeroDivisionError("a bug")))
    assert (told.code, told.exit) == ("X00", 1) and "unisono itself" in told.likely


def _without_frames(error: Exception) -> Exception:
    return error.with_traceback(None)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PermissionError(13, "Permission denied", "/x"), UsageError, "E02"),
        (ModuleNotFoundError("no", name="sklearn"), UsageError, "E01"),
        (OSError(24, "Too many open files"), UsageError, "E02"),
        (MemoryError(), Infeasible, "M01"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Infeasible, "M01"),
        (KeyboardInterrupt(), Interrupted, "S02"),
    ],
)
def test_what_the_system_refuses_has_a_code_of_its_own(error: Exception, kind, code: str) -> None:
    told = known(_without_frames(error))
    assert type(told) is kind and told.code == code


def test_six_lines_are_shown_and_all_are_kept(mine) -> None:
    told = known(caught(lambda: mine.outer(lambda: mine.deep(50))))
    lines = told.shown.splitlines()
    assert (
        len(lines) <= 6
        and lines[0].startswith("Traceback")
        and lines[-1] == "ZeroDivisionError: division by zero"
    )
    assert sum("mine.py" in line for line in lines) == 2
    assert "Previous line repeated 48 more times" in told.trace
    assert told.as_dict()["traceback"] == told.trace


def test_a_file_that_is_not_python_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("x = 1\ndef f(:\n")
    error = caught(lambda: compile((tmp_path / "torn.py").read_text(), str(tmp_path / "torn.py"), "exec"))
    assert place(error) == f"{tmp_path / 'torn.py'}:2 in <module>"


def test_a_folder_whose_name_begins_as_ours_is_the_users() -> None:
    ours = Path(UnisonoError.__init__.__code__.co_filename).parents[1]
    error = SyntaxError("no", (f"{ours}_mine{os.sep}a.py", 3, 0, "x"))
    assert [frame.lineno for frame in users(error)] == [3]
    assert users(SyntaxError("no", (f"{ours}{os.sep}a.py", 3, 0, "x"))) == []


GLOO = "[enforce fail at /a/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ib7"
NCCL = "NCCL error in: /a/NCCLUtils.cpp:77, invalid usage\nLast error:\nBootstrap : no socket interface found"


@pytest.mark.parametrize(
    ("said", "name", "why"),
    [
        (GLOO, "GLOO_SOCKET_IFNAME", "Unable to find address for: ib7"),
        (
            "makeDeviceForInterface(): unsupported gloo device",
            "GLOO_DEVICE_TRANSPORT",
            "unsupported gloo device",
        ),
        (NCCL, "NCCL_SOCKET_IFNAME", "no socket interface found"),
        (
            "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.",
            "TORCH_DISTRIBUTED_DEBUG",
            "OFF, INFO",
        ),
    ],
)
def test_a_variable_that_is_wrong_here_is_the_cause(said: str, name: str, why: str) -> None:
    """And no rank that has gone, of which such words would else be an echo."""
    told = known(RuntimeError(said))
    assert (told.code, told.exit, told.where) == ("L13", 2, name) and name in told.what and why in told.what
    assert told.fix.startswith(f"unset {name}, or ")
    assert (
        error_record.describe(RuntimeError(said))["code"],
        error_record.describe(RuntimeError(said))["echo"],
    ) == (
        "L13",
        False,
    )


def test_a_loopback_that_is_down_is_told_with_its_remedy() -> None:
    told = known(RuntimeError(GLOO.replace("ib7", "lo")))
    assert (told.code, told.where, told.fix) == ("L13", "lo", "ip link set lo up")


@pytest.mark.parametrize(
    "said", ["Connection closed by peer [127.0.0.1]:1", "NCCL error: unhandled system error"]
)
def test_words_of_a_rank_that_has_gone_name_no_variable(said: str) -> None:
    assert at_fault(RuntimeError(said)) == ("", "") and error_record.describe(RuntimeError(said))["echo"]

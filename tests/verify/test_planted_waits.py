"""Every wait, event and `record_stream` of our code on the way of a step has a planted bug that takes it away."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.verify.planted.bug import SOURCE, all_bugs

WAITS = {
    "wait", "wait_event", "wait_stream", "record_event", "record_stream", "synchronize", "drain",
}  # fmt: skip
ROOMS = ("comm", "codecs", "models", "parallel", "sync", "train", "library", "measure")
NOT_OURS = "comm/sim/"
"""Which is the device itself."""
OTHER = {
    # what the host waits for is not the device
    "comm/outside.py": "a thread of the host",
    "comm/gone.py:_linger": "the store of the host",
    "comm/gone.py:_break_off": "breaks a connection, which the end of the process would break too",
    "comm/mailbox/": "a thread of the host, and files",
    "comm/threads.py": "ranks on threads, which the tests use",
    "comm/thread_group.py": "ranks on threads, which the tests use",
    "train/data/": "processes and threads that read data",
    "train/recovery/drain.py": "a thread of the host",
    "train/sinks/": "a thread of the host",
    "train/watch/": "a thread of the host",
    "train/state/saving.py": "the thread that writes a save",
    "train/state/checkpoint/saver.py:Saver.save": "the thread that writes a save",
    "sync/_mail.py": "a thread of the host",
    "sync/_servers/": "connections between processes of the host",
    "train/samplers/": "processes and connections of the host",
    "library/manager.py": "collectives of the host: it meets over Gloo alone",
    "library/trainer.py": "a barrier of the host",
    "library/ranks.py:Ranks.main_first": "a barrier of the host",
    # no number of a run depends on it
    "comm/probe.py": "measures a link",
    "sync/_link.py": "measures a link",
    "measure/": "measures",
    "parallel/measured.py": "measures",
    "parallel/experts.py:DealtDispatch._rehearsed": "an imagined device, without numbers",
    "comm/collectives/mpi/": "needs mpirun, which tests/comm/test_collectives.py looks for",
}
"""File, folder or FILE:FUNCTION → why a wait there has no planted bug."""

Place = tuple[Path, str, int]  # file, function, last line


def waits() -> Iterator[Place]:
    for package in ("unisono", "unisono_contrib"):
        for room in ROOMS:
            for path in sorted((SOURCE / package / room).rglob("*.py")):
                if NOT_OURS not in path.as_posix():
                    for function, line in _calls(ast.parse(path.read_text()), ""):
                        yield path, function, line


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
            if name in WAITS:
                yield function, child.end_lineno or 0
        yield from _calls(child, inner)


@cache
def planted() -> dict[Path, set[int]]:
    """The lines that bugs named `wait_…` replace, by file."""
    lines: dict[Path, set[int]] = {}
    for bug in all_bugs():
        if bug.name.startswith("wait_"):
            path = bug.path(SOURCE)
            before, _, _ = path.read_text().partition(bug.old)
            first = before.count("\n") + 1
            lines.setdefault(path, set()).update(range(first, first + bug.old.rstrip("\n").count("\n") + 1))
    return lines


def reason(place: Place) -> str:
    """Why a wait needs no bug, by the key of `OTHER`; "" where there is none."""
    name = "/".join(place[0].relative_to(SOURCE).parts[1:])
    keys = (key for key in OTHER if name.startswith(key) or f"{name}:{place[1]}" == key)
    return next(keys, "")


def test_each_wait_has_a_planted_bug_or_a_reason() -> None:
    bare = [
        f"{path.relative_to(SOURCE)}:{line} in {function}"
        for path, function, line in waits()
        if line not in planted().get(path, ()) and not reason((path, function, line))
    ]
    assert not bare, "take them away in tests/verify/planted/in_waits.toml"


def test_reasons_are_of_something_and_of_no_wait_that_has_a_bug() -> None:
    open_places = [place for place in waits() if place[2] not in planted().get(place[0], ())]
    assert {reason(place) for place in open_places} - {""} == OTHER.keys()
    assert len(planted()) >= 20

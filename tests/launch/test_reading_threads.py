"""Data whose reading starts threads: ranks are not forked from a process that has them, and the run goes on."""

import threading
import time
from typing import Any

import pytest

from unisono.launch.fork_server import ForkServer
from unisono.launch.fork_server_main import thread_count, threads_beyond

pytestmark = pytest.mark.timeout(120)
_READY = threading.Lock()


def _pool(name: str) -> None:
    """A thread that never ends, and holds a lock from now on, as one of a library's pool may."""
    threading.Thread(
        target=lambda: (_READY.acquire(), threading.Event().wait()), name=name, daemon=True
    ).start()
    while not _READY.locked():
        time.sleep(0)


def prepare(argument: dict[str, Any]) -> dict[str, Any]:
    for name in argument["pools"]:
        _pool(name)
    if argument["fails"]:
        raise ValueError("damaged")
    return {"lines": argument["lines"], "threads": thread_count()}


def entry(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    """Reads more: with a lock that a thread had which is not there any more, it would wait for ever."""
    pools = [thread.name for thread in threading.enumerate() if thread.name in argument["pools"]]
    if argument["pools"] and not pools:
        _READY.acquire()
    return {"lines": shared["lines"], "pools": pools}


def played(pools: list[str], fails: bool = False) -> tuple[Any, list[str]]:
    """The outcome of two ranks, and the notes that were told."""
    notes: list[str] = []

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "note":
            notes.append(event["text"])

    with ForkServer(f"{__name__}:entry", path=["."]) as nursery:
        outcome = nursery.run({"lines": 3, "pools": pools, "fails": fails}, 2, on_event=hear, timeout=60)
    return outcome, notes


def test_data_that_start_threads_are_read_by_each_rank() -> None:
    outcome, notes = played(["io-pool"])
    assert outcome.error is None, outcome.error
    assert outcome.results == [{"lines": 3, "pools": ["io-pool"]}] * 2
    assert len(notes) == 1 and "io-pool" in notes[0] and "each rank reads it for itself" in notes[0]


def test_data_that_start_none_are_read_once() -> None:
    outcome, notes = played([])
    assert outcome.results == [{"lines": 3, "pools": []}] * 2 and notes == []


def test_a_mistake_in_the_data_is_told_as_ever() -> None:
    outcome, _ = played(["io-pool"], fails=True)
    assert outcome.exit == 1 and "damaged" in outcome.error.what


def test_threads_are_named_and_those_that_leave_are_none() -> None:
    before = thread_count()
    quick = threading.Thread(target=lambda: None)
    quick.start()
    quick.join()
    assert threads_beyond(before) == []
    stays = threading.Event()
    thread = threading.Thread(target=stays.wait, name="stays-a-while")
    thread.start()
    assert "stays-a-while" in threads_beyond(before)
    stays.set()
    thread.join()
    assert threads_beyond(before) == []

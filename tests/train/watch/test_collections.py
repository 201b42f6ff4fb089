"""Garbage is collected between steps, as often as asked, and its time is counted either way."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from unisono.train.watch.collections import StepCollections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    yield
    assert gc.isenabled() and gc.callbacks == callbacks


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def garbage() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_collections_are_held_between_steps() -> None:
    held = StepCollections(2)
    assert not gc.isenabled()
    lost = garbage()
    pressure = [[] for _ in range(10 * gc.get_threshold()[0])]
    assert held.stepped(1) == 0.0 and lost() is not None and pressure
    assert held.stepped(2) > 0.0 and lost() is None
    assert held.stepped(3) == 0.0
    held.close()


def test_without_a_number_python_decides_and_its_time_is_counted() -> None:
    held = StepCollections(0)
    assert gc.isenabled()
    lost = garbage()
    assert held.stepped(1) >= 0.0 and lost() is not None
    gc.collect()
    assert held.stepped(2) > 0.0 and lost() is None
    assert held.stepped(3) == 0.0
    held.close()

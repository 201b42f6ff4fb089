"""Garbage is collected between steps, as often as asked, and by Python's own rule otherwise."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from unisono.train.watch.collections import StepCollections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert gc.isenabled()


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
    held.stepped(1)
    assert lost() is not None and pressure
    held.stepped(2)
    assert lost() is None
    held.close()


def test_without_a_number_python_decides() -> None:
    held = StepCollections(0)
    assert gc.isenabled()
    lost = garbage()
    held.stepped(1)
    assert lost() is not None
    pressure = [[] for _ in range(10 * gc.get_threshold()[0])]
    assert lost() is None and pressure
    held.close()

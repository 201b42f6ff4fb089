"""Tests run in any order, on any machine: what a machine lacks is skipped aloud, what the shell holds is kept out."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.daily import put_off

# Two workers share the cores, and threads that wait for work of other threads would take them from each other. Before
# torch is imported; ranks set their own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests make many objects and few cycles: a collection of the youngest after seven hundred finds nothing to do.
gc.set_threshold(10_000)

# How long a drawn example takes says how busy the machine is.
hypothesis.settings.register_profile("unisono", deadline=None)
hypothesis.settings.load_profile("unisono")

pytest_plugins = ["tests.ranks", "tests.threads"]

# A shell that starts tests in the background has SIGINT ignored, and whatever they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules that take longest, then folders of such: two workers that begin with them end at about the same time.
LONG = (
    "planner/test_one_count.py", "verbs/test_auto.py", "verify/test_proof.py", "planner/test_search.py",
    "planner/test_accuracy.py", "house/test_families.py", "verbs", "launch", "verify", "library", "parallel",
)  # fmt: skip


def _turn(path: Path) -> int:
    named = (f"{path.parent.name}/{path.name}", path.parent.name)
    return min((LONG.index(name) for name in named if name in LONG), default=len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_off(items)
    items.sort(key=lambda item: _turn(item.path))
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="not root"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    _set_aside(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    _set_aside(item.config, nextitem is not None and nextitem.path != item.path)


IMPORTED = pytest.StashKey[int]()


def _set_aside(config: pytest.Config, between_modules: bool = False) -> None:
    """What was imported stays to the end, a million objects with torch: the collector need not walk through them. A
    full collection took a third of a second, and parts of the product ask for one for each model. Between modules what
    is left is caches, which stay too."""
    if between_modules or len(sys.modules) >= config.stash.get(IMPORTED, 0) + 20:
        gc.collect()
        gc.freeze()
        config.stash[IMPORTED] = len(sys.modules)


def _gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def usual_dtype() -> Iterator[None]:
    """Ranks on threads may set the dtype of this process as theirs; the next test begins with torch's own."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)


OF_A_STARTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _settings() -> list[str]:
    return [name for name in os.environ if name.startswith("UNISONO_") or name in OF_A_STARTER]


@pytest.fixture(autouse=True)
def no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recipe in a test is what the test says, whatever the shell's UNISONO_* variables say; and ranks that were played
    in this process leave their variables to no later test."""
    for name in _settings():
        monkeypatch.delenv(name)
    yield
    for name in _settings():
        del os.environ[name]

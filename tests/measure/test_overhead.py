"""What `benchmarks/overhead.py` makes of its times: shares, as functions of numbers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("overhead", FOLDER / "overhead.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def times(
    without: list[float], with_: list[float], others: list[float], **more: list[float]
) -> dict[str, Any]:
    none = [0.0] * len(without)
    found = {"": (without, with_), "cpu_": (without, with_), "others_": (none, others)}
    found |= {"lasting_": (none, none), "beside_": (none, none)}
    pairs = {
        f"{name}{kind}": one for name, both in found.items() for kind, one in zip(("without", "with"), both)
    }
    return pairs | more


def test_the_slowest_rank_counts_and_each_pair_is_a_ratio(overhead: Any) -> None:
    ranks = [
        times([1.0, 2.0, 1.0], [1.01, 2.02, 1.0], [0.0] * 3),
        times([0.5] * 3, [0.5, 0.5, 1.03], [0.0] * 3),
    ]
    row = overhead.shares(ranks, 3, 200)
    assert sorted(row["pairs"]) == pytest.approx([0.01, 0.01, 0.03])
    assert row["more"] == pytest.approx(0.01)
    assert row["interval"] == pytest.approx((0.01, 0.03))


def test_a_check_counts_once_in_its_period_and_the_supervisor_wholly(overhead: Any) -> None:
    row = overhead.shares(
        [times([0.5], [0.5], [0.0], check=[0.6], cpu_check=[0.5])], 1, 200, more=(0.002, 0.003)
    )
    assert row["guard"] == pytest.approx(0.6 / 0.5 / 200)
    assert row["more"] == pytest.approx(0.006 + 0.002)
    assert row["clocks"] == pytest.approx(0.005 + 0.003)


def test_a_checkpoint_counts_once_in_its_steps(overhead: Any) -> None:
    """A block of 8 steps takes half a step longer by it: 1 % of 50 steps."""
    row = overhead.shares([times([1.0], [8.5 / 8], [0.0])], 1, 200, length=8, every=50)
    assert row["more"] == row["cpu"] == pytest.approx(0.01)


def test_pairs_that_others_disturbed_most_are_left_out(overhead: Any) -> None:
    ranks = [times([1.0] * 4, [1.0, 9.0, 1.02, 9.0], [0.01, 0.6, 0.02, 0.5])]
    row = overhead.shares(ranks, 2, 200)
    assert row["pairs"] == pytest.approx([0.0, 0.02])
    assert (row["others"], row["played"]) == (0.02, 4)


def test_own_clocks_add_what_goes_by_the_clock_and_what_comes_with_steps(overhead: Any) -> None:
    """Threads that take 0.2 % of a core, and a snapshot that takes 3 ms of steps of half a second."""
    one = times([0.5], [0.9], [0.0], lasting_with=[0.002], beside_with=[0.004], beside_without=[0.001])
    assert overhead.shares([one], 1, 200)["clocks"] == pytest.approx(0.002 + 0.006)
    assert overhead.shares([one], 1, 200, length=5, every=50)["clocks"] == pytest.approx(0.002 + 0.0006)

"""What stands around a step computes on several ranks what it computes on one."""

from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.library import mending
from tests.ranks import World
from unisono.library import Job

pytestmark = pytest.mark.timeout(120)
PLANS = [("dp=2", 2), ("shard=2", 2)]


def compare(got: list[dict[str, Any]], want: dict[str, Any], near: float) -> None:
    for rank in got:
        for name, values in want["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=near), name
        for key in want.keys() - {"weights"}:
            assert (
                rank[key] == pytest.approx(want[key], abs=near) if key == "losses" else rank[key] == want[key]
            )


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
@pytest.mark.parametrize(
    ("dtype", "near"), [("fp16", 2e-2), pytest.param("bf16", 1e-1, marks=pytest.mark.slow)]
)
def test_mixed_precision(threads: World, plan: str, ranks: int, dtype: str, near: float) -> None:
    """Losses are near in what the dtype can say."""
    (want,) = threads(mending.mixed, 1, group=False, plan="dp=1", dtype=dtype, scale=256.0)
    got = threads(mending.mixed, ranks, group=False, plan=plan, dtype=dtype, scale=256.0)
    for rank in got:
        assert rank["losses"] == pytest.approx(want["losses"], abs=near)
        assert rank["scales"] == want["scales"]
        assert rank["losses"] == got[0]["losses"] and rank["weights"] == got[0]["weights"]


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_ranks_leave_out_the_same_steps(threads: World, plan: str, ranks: int) -> None:
    """The scale is so large at first that gradients overflow."""
    first, *others = threads(mending.mixed, ranks, group=False, plan=plan, dtype="fp16", scale=2.0**19)
    assert all(rank == first for rank in others)
    assert 2.0**19 > first["scales"][-1] == first["scales"][-2] and first["losses"][-1] < first["losses"][0]


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), *PLANS])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(threads: World, plan: str, ranks: int) -> None:
    got = threads(mending.overflow, ranks, group=False, plan=plan)
    assert got == [{"same": True, "scale": 2.0}] * ranks


@pytest.mark.parametrize(("plan", "ranks"), [*PLANS, ("dp=3", 3)])
def test_batches_of_each_ranks_own_are_one_global_batch(threads: World, plan: str, ranks: int) -> None:
    """Uneven batches, and uneven numbers of them."""
    (want,) = threads(mending.joined_alone, 1, group=False, parts=ranks)
    compare(threads(mending.joined, ranks, group=False, plan=plan, parts=ranks), want, 1e-10)


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_clipping_by_value(threads: World, plan: str, ranks: int) -> None:
    (want,) = threads(mending.clipped, 1, group=False, plan="dp=1")
    compare(threads(mending.clipped, ranks, group=False, plan=plan), want, 1e-12)


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_all_that_has_a_state_goes_on(threads: World, tmp_path: Path, plan: str, ranks: int) -> None:
    """One process saves, ranks go on and save, one process ends the run that was not broken off."""
    (want,) = threads(mending.kept, 1, group=False, plan="dp=1", folder=str(tmp_path / "whole"), stop=None)
    folder = str(tmp_path / "parts")
    threads(mending.kept, 1, group=False, plan="dp=1", folder=folder, stop=3)
    threads(mending.kept, ranks, group=False, plan=plan, folder=folder, stop=7)
    got = threads(mending.kept, ranks, group=False, plan=plan, folder=folder, stop=None)
    back = threads(mending.kept, 1, group=False, plan="dp=1", folder=folder, stop=None)
    compare([*got, *back], want, 1e-10)


def test_what_cannot_be_kept_is_refused() -> None:
    job: Job = unisono.init()
    with pytest.raises(unisono.UnisonoError):
        job.autocast("fp8")
    with pytest.raises(unisono.UnisonoError) as raised:
        job.keep(epoch=3)
    assert raised.value.code == "J23" and raised.value.fix
    job.keep(mine=mending.Epochs())
    with pytest.raises(unisono.UnisonoError) as raised:
        job.keep(mine=mending.Epochs())
    assert raised.value.code == "J23"


def test_ranks_talk(threads: World, tmp_path: Path) -> None:
    got = threads(mending.talk, 2, group=False, folder=str(tmp_path))
    assert all(rank.pop("broadcast") and rank.pop("seen") for rank in got)
    assert [rank.pop("said") for rank in got].count("") >= 1
    want = {"each": [0, 1], "sums": [3, 0.5, 0, [1.0, 1.0]], "flags": [True, False], "code": "J22"}
    assert got == [want, want]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
@pytest.mark.parametrize("order", ["before", "after", "in place"])
def test_compiled_models(world: World, plan: str, ranks: int, order: str) -> None:
    (want,) = world(mending.compiled, 1, group=False, plan=None, order="")
    got = world(mending.compiled, ranks, group=False, plan=plan, order=order)
    compare(got, want, 1e-9)

"""The user's own loop on several ranks computes what it computes on one device."""

from typing import Any

import pytest

from tests.library import loops
from tests.ranks import World

OPTIMIZERS = {name: {"optimizer": name, "epochs": 1} for name in ("fused", "sgd", "adagrad", "rmsprop")}

LOOPS: dict[str, dict[str, Any]] = {
    # 50 samples in batches of 12: the last batch has 2, so parts are uneven, and a third rank has none of it.
    "ordinary": {},
    "clipped": {"clip": 0.5, "fine": True},
    "accumulated": {"micro": 3, "batch": 7},
    # Weight decay would move these parameters if they had a gradient of zeros.
    "unreached": {"unused": True, "epochs": 1},
    "plain iterable": {"plain": True, "epochs": 1},
    **OPTIMIZERS,
}


def near(one: Any, other: Any, bound: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < bound


@pytest.fixture(scope="module")
def expected(threads: World) -> dict[str, Any]:
    """One device's numbers."""
    (found,) = threads(
        loops.alone, 1, group=False, each={**LOOPS, "closure": {"optimizer": "lbfgs", "epochs": 1}}
    )
    return found


def compare(got: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in got:
        for name, found in rank.items():
            assert near(found["losses"], expected[name]["losses"], 1e-12), name
            for tensor, values in expected[name]["weights"].items():
                assert near(found["weights"][tensor], values, 1e-10), (name, tensor)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("dp=2", 2), ("shard=2", 2), pytest.param("dp=2 shard=2", 4, marks=pytest.mark.slow)],
)
def test_weights_and_losses_are_those_of_one_device(
    threads: World, expected: dict[str, Any], plan: str, ranks: int
) -> None:
    got = threads(loops.on_ranks, ranks, group=False, plan=plan, each=LOOPS)
    compare(got, expected)
    assert [rank["ordinary"]["steps"] for rank in got] == [10] * ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("plan", "ranks"), [("dp=3", 3), ("shard=2 zero=2", 2), ("shard=2 zero=1", 2)])
def test_other_plans(threads: World, expected: dict[str, Any], plan: str, ranks: int) -> None:
    each = {name: LOOPS[name] for name in ("ordinary", "clipped", "accumulated")}
    compare(threads(loops.on_ranks, ranks, group=False, plan=plan, each=each), expected)


@pytest.mark.timeout(120)
def test_an_optimiser_that_calls_the_loop_back(threads: World, expected: dict[str, Any]) -> None:
    each = {"closure": {"optimizer": "lbfgs", "epochs": 1}}
    compare(threads(loops.on_ranks, 2, group=False, plan="dp=2", each=each), expected)


@pytest.mark.timeout(120)
def test_loaders_with_workers(world: World, expected: dict[str, Any]) -> None:
    got = world(loops.on_ranks, 2, group=False, plan="dp=2", each={"ordinary": {"workers": 1}})
    compare(got, expected)

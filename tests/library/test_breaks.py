"""A loop that leaves a pass early and saves goes on as the one that never stopped, whatever gives the batches."""

from pathlib import Path
from typing import Any

import pytest

from tests.library.breaks import KINDS, WORKERS, life
from tests.ranks import World

pytestmark = pytest.mark.timeout(120)
WAYS = [
    ("after", 3),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in (("after", 1), ("after", 6), ("named", 3), ("end", 2))
    ),
]


def goes_on(
    run: World, folder: Path, kind: str, how: str, breaks: int, ranks: tuple[int, int], workers: str
) -> None:
    """Two lives on these ranks see what one process alone sees."""
    given: Any = {"kind": kind, "folder": str(folder), "breaks": breaks, "workers": workers, "group": False}
    (alone,) = run(life, 1, plan="dp=1", how="", **given)
    parts = [
        run(life, size, plan=f"dp={size}", how=how, again=again, **given)[0]
        for size, again in zip(ranks, (False, True), strict=True)
    ]
    assert [sorted(batch) for part in parts for batch in part] == [sorted(batch) for batch in alone]


@pytest.mark.parametrize(("how", "breaks"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_loader(threads: World, tmp_path: Path, kind: str, how: str, breaks: int) -> None:
    goes_on(threads, tmp_path, kind, how, breaks, (2, 3), "")


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("own generator", "persistent"),
        *(
            pytest.param(kind, workers, marks=pytest.mark.slow)
            for kind in ("shuffled", "batch_sampler", "stream", "stream of batches")
            for workers in WORKERS
        ),
    ],
)
def test_with_workers(world: World, tmp_path: Path, kind: str, workers: str) -> None:
    goes_on(world, tmp_path, kind, "after", 3, (2, 1), workers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "batch_sampler"])
def test_workers_that_stay_know_the_order_of_a_later_pass(world: World, tmp_path: Path, kind: str) -> None:
    """They draw a seed in the first pass alone."""
    given: Any = {"kind": kind, "folder": str(tmp_path), "group": False, "workers": "persistent", "leaves": 1}
    (alone,) = world(life, 1, plan="dp=1", how="", breaks=99, **given)
    (first, *_) = world(life, 2, plan="dp=2", how="inside", breaks=3, **given)
    (then, *_) = world(life, 1, plan="dp=1", how="inside", breaks=99, again=True, **given)
    assert [sorted(batch) for batch in first + then] == [sorted(batch) for batch in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_inside_the_loop_the_rest_of_the_pass_comes(threads: World, tmp_path: Path, kind: str) -> None:
    """All of the pass, for the break comes with the end of that life."""
    given: Any = {"kind": kind, "folder": str(tmp_path), "group": False}
    (alone,) = threads(life, 1, plan="dp=1", how="", breaks=99, **given)
    (first, *_) = threads(life, 2, plan="dp=2", how="inside", breaks=3, **given)
    (then, *_) = threads(life, 3, plan="dp=3", how="inside", breaks=99, again=True, **given)
    assert [sorted(batch) for batch in first + then] == [sorted(batch) for batch in alone]

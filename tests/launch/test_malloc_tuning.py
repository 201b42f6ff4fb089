"""What ranks ask of the C library: huge pages where there are any and nobody has decided otherwise."""

import os

import pytest
import torch

from tests.ranks import World
from unisono.launch import malloc_tuning
from unisono.observe.memory import rss_mib


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_tuning, "_has_huge_pages", lambda: True)


@pytest.mark.usefixtures("huge")
def test_huge_pages_come_beside_what_the_user_set() -> None:
    assert malloc_tuning.with_huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    told = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert malloc_tuning.with_huge_pages(told) == {
        "GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    }


@pytest.mark.usefixtures("huge")
def test_what_the_user_decided_stays() -> None:
    assert malloc_tuning.with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}


def test_a_system_without_huge_pages_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_tuning, "_has_huge_pages", lambda: False)
    assert malloc_tuning.with_huge_pages({}) == {}


def freed(ctx, sizes_mib):
    """MiB that are resident before, with, and after blocks of these sizes."""
    before = rss_mib()
    blocks = [torch.zeros(size << 18) + 1 for size in sizes_mib]
    held = rss_mib()
    del blocks
    return {"before": before, "held": held, "after": rss_mib()}


def test_what_is_freed_stays_and_of_large_blocks_only_where_getting_them_again_is_dear(world: World) -> None:
    [small] = world(freed, 1, sizes_mib=[1] * 64)
    assert small["held"] > small["before"] + 48
    assert small["after"] > small["held"] - 16
    [large] = world(freed, 1, sizes_mib=[64])
    cheap = "glibc.malloc.hugetlb=1" in {**os.environ, **malloc_tuning.with_huge_pages(os.environ)}.get(
        "GLIBC_TUNABLES", ""
    )
    gone = large["held"] - large["after"]
    assert gone > 48 if cheap else gone < 16

"""Parts on disk stay within a bound, and are made once for all who want them."""

import os
import threading
from pathlib import Path

import pytest

from unisono_contrib.train.data.stream.parts import PartCache, PartReader

pytestmark = pytest.mark.timeout(60)


def kept(cache: PartCache, name: str, size: int = 100) -> int:
    return cache.kept(
        name,
        lambda folder: (folder / "body").write_bytes(bytes(size)),
        lambda folder, _: len((folder / "body").read_bytes()),
    )


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir() if not each.name.startswith("."))


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    cache = PartCache(tmp_path, 350)
    for i, name in enumerate("abc"):
        assert kept(cache, name) == 100
        os.utime(tmp_path / name, (i, i))
    kept(cache, "a")
    kept(cache, "d")
    assert names(tmp_path) == ["a", "c", "d"]
    assert kept(cache, "e", 1000) == 1000 and names(tmp_path) == ["e"]  # one that is too large is alone
    assert not list(tmp_path.glob(".part-*"))


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = PartCache(tmp_path, 350)

    def fail(folder: Path) -> None:
        (folder / "body").write_bytes(b"half")
        raise ValueError

    with pytest.raises(ValueError):
        cache.kept("a", fail, lambda folder, _: None)
    assert not names(tmp_path) and not list(tmp_path.glob(".part-*"))


def test_a_part_is_read_once_for_all_threads_and_again_after_an_error() -> None:
    read: list[int] = []
    gate, failing = threading.Event(), [True]

    def opened(number: int) -> int:
        read.append(number)
        if number == 2 and failing.pop() if failing and number == 2 else False:
            raise OSError("not yet")
        gate.wait(30)
        return number * 10

    reader = PartReader(opened, threads=2, most=3)
    reader.expect([0, 1])
    gate.set()
    assert [reader.get(i) for i in (0, 1, 0)] == [0, 10, 0] and sorted(read) == [0, 1]
    with pytest.raises(OSError, match="not yet"):
        reader.get(2)
    assert reader.get(2) == 20
    assert [reader.get(i) for i in (3, 4, 5)] == [30, 40, 50]
    reader.get(0)
    assert read.count(0) == 2  # it was given up for those that came later

"""A folder of the cache is made once, also where several processes make it at the same time."""

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from unisono.spec.errors import UsageError
from unisono.train.data import cache


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as some that are shared between hosts."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def made_meanwhile(folder: Path, ready: list[str]) -> Any:
    """Makes the folder's content; another process comes, makes the same and is ready sooner."""

    def make(under_way: Path) -> dict[str, Any]:
        (under_way / "tokens").write_text("abc")
        if not ready:
            ready.append("begun")
            ready.append(
                str(cache.kept(str(folder), "kind", {"a": 1}, made_meanwhile(folder, ready), pytest.fail)[0])
            )
            assert (under_way / "tokens").exists(), "who came later took what is under way for left over"
        return {"count": 3}

    return make


def test_who_is_later_finds_what_the_first_has_made(tmp_path: Path, lockless: None) -> None:
    ready: list[str] = []
    folder, meta = cache.kept(str(tmp_path), "kind", {"a": 1}, made_meanwhile(tmp_path, ready), pytest.fail)
    assert str(folder) == ready[1] and meta == {"count": 3} and (folder / "tokens").read_text() == "abc"
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


def test_what_lies_there_and_is_none_of_ours_is_told(tmp_path: Path, lockless: None) -> None:
    def make(under_way: Path) -> dict[str, Any]:
        final = under_way.with_name(under_way.name.partition(".tmp-")[0])
        final.mkdir()
        (final / "other").write_text("x")
        return {}

    with pytest.raises((OSError, UsageError)):
        cache.kept(str(tmp_path), "kind", {}, make, pytest.fail)


def test_under_a_lock_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    folder, _ = cache.kept(str(tmp_path), "kind", {}, lambda under_way: {}, pytest.fail)
    (tmp_path / f"{folder.name}.tmp-12").mkdir()
    (folder / cache.META).unlink()
    folder.rmdir()
    cache.kept(str(tmp_path), "kind", {}, lambda under_way: {}, pytest.fail)
    assert not (tmp_path / f"{folder.name}.tmp-12").exists()

"""A little of `python -m tests.train.state.checkpoint.torture`; all of it is slow."""

from pathlib import Path

import pytest
import torch

from tests.train.state.checkpoint.torture import PARTS, Count
from unisono.spec import doubtful
from unisono.train.state.checkpoint import manifest, tensorfile, write

SLOW = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for name in PARTS]


def played(name: str, place: Path, tries: int) -> Count:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # children are forked, and would wait for threads that they do not have
    try:
        count = PARTS[name][0](place, tries)
    finally:
        torch.set_num_threads(threads)
    if count.skipped:
        pytest.skip(count.skipped)
    return count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in PARTS if name != "disk"])
def test_a_little_torture(name: str, tmp_path: Path) -> None:
    count = played(name, tmp_path, PARTS[name][2])
    assert count.wrong == [] and count.tried >= max(1, PARTS[name][2]), count


@pytest.mark.root
@pytest.mark.timeout(120)
def test_full_and_read_only_disks(tmp_path: Path) -> None:
    count = played("disk", tmp_path, PARTS["disk"][2])
    assert count.wrong == [] and count.seen == {"full": PARTS["disk"][2], "read-only": PARTS["disk"][2]}, (
        count
    )


@pytest.mark.parametrize("name", SLOW)
def test_all_torture(name: str, tmp_path: Path) -> None:
    assert played(name, tmp_path, PARTS[name][1]).wrong == []


# The torture notices what it is there for: each defect below is planted, and found.


def test_it_notices_checksums_that_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "checksum", lambda data, so_far=0: 0)
    assert any("not noticed" in text for text in played("flips", tmp_path, 40).wrong)


def test_it_notices_a_save_that_is_visible_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones go before the new one has its name."""
    true = write._commit

    def eager(run: Path, vote: object, final: Path, told: object) -> None:
        for step in (1, 2):
            write.shutil.rmtree(final.with_name(f"step-{step:06d}"), ignore_errors=True)
        true(run, vote, final, told)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "_commit", eager)
    assert any("lost" in text for text in played("operations", tmp_path, 40).wrong)


def test_it_notices_a_reader_that_follows_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def opened(path: Path, follow: bool = True) -> int:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would keep it for ever

    def read(path: Path, limit: int, follow: bool = True) -> bytes:
        with os.fdopen(opened(path), "rb") as file:
            return file.read(limit)

    monkeypatch.setattr(manifest, "read_regular", read)
    monkeypatch.setattr(doubtful, "open_regular", opened)
    wrong = played("fuzz", tmp_path, 400).wrong
    assert wrong, "links and pipes were followed"

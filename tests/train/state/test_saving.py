"""A checkpoint that cannot be written costs a note, not the run: on all ranks alike, and without a wait."""

import errno
import json
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono.train.state.checkpoint.write as write
import unisono.train.state.saving as saving
from tests.train.small import recipe
from tests.train.test_session import losses, play
from unisono.launch.context import RankContext
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver, latest, newest_whole, read_full, verify_folder
from unisono.train.state.checkpoint.vote import Vote
from unisono.train.state.checkpoint.write import doomed, no_room
from unisono.train.state.saving import Saving

pytestmark = pytest.mark.timeout(120)
EVERY = {"save_every": 2, "steps": 7}


def failing(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], number: int, rank: int = 0) -> None:
    """Writes of this rank's tensors fail in these steps, half way."""
    true = write.write_tensors

    def tried(path: Path, tensors: Any) -> Any:
        if path.name == f"rank-{rank:05d}.safetensors" and any(f"step-{s:06d}." in str(path) for s in steps):
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        return true(path, tensors)

    monkeypatch.setattr(write, "write_tensors", tried)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, async_save: bool
) -> None:
    told = recipe(tmp_path, async_save=async_save, **EVERY)
    play(told, "dp=2", 2, tmp_path / "good")
    failing(monkeypatch, (4,), number)
    heard: list[str] = []
    ended = play(told, "dp=2", 2, tmp_path / "bad", heard=heard)
    assert [end["steps"] for end in ended] == [7, 7]
    (note,) = [text for text in heard if "could not be written" in text]
    assert note.startswith(f"checkpoint step-4 could not be written: {os.strerror(number)}")
    assert note.endswith("training goes on, the next is tried at step 6")
    assert ("needs" in note and "has" in note) == (number == errno.ENOSPC)
    assert names(tmp_path / "bad") == ["step-000002", "step-000006", "step-000007"]
    assert all(verify_folder(path) == [] for path in (tmp_path / "bad" / "checkpoints").iterdir())
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")


@pytest.mark.parametrize("async_save", [False, True])
def test_too_little_room_for_all_ranks_together_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """Each rank alone would have had room."""
    monkeypatch.setattr(saving, "free_bytes", lambda folder: 250_000)
    wrote: list[Path] = []
    true = write.write_tensors
    monkeypatch.setattr(write, "write_tensors", lambda path, t: (wrote.append(path), true(path, t))[1])
    heard: list[str] = []
    with pytest.raises(UsageError) as caught:
        play(recipe(tmp_path, async_save=async_save, **EVERY), "shard=2", 2, tmp_path / "run", heard=heard)
    assert caught.value.code == "K02" and "step-7" in caught.value.what  # the last must not fail
    assert [text.partition(" could")[0] for text in heard if "could not be written" in text] == [
        f"checkpoint step-{step}" for step in (2, 4, 6)
    ]
    for text in (text for text in heard if "could not" in text):
        assert (
            244.1 < float(re.search(r"No space left on device: needs ([\d.]+) KiB, has 244.1", text)[1]) < 488
        )
    assert not wrote and len(losses(tmp_path / "run")) == 7


def test_only_the_last_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, (7,), errno.EROFS)
    heard: list[str] = []
    with pytest.raises(UsageError) as caught:
        play(recipe(tmp_path, **EVERY), "dp=2", 2, tmp_path / "run", heard=heard)
    assert caught.value.code == "K02" and "step-7 could not be written" in caught.value.what
    assert not [text for text in heard if "could not" in text]
    assert newest_whole(tmp_path / "run") == latest(tmp_path / "run")
    assert names(tmp_path / "run") == ["step-000002", "step-000004", "step-000006"]


def test_a_save_that_was_asked_for_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, (3,), errno.EIO)
    with pytest.raises(UsageError) as caught:
        play(recipe(tmp_path, **EVERY), "dp=2", 2, tmp_path / "run", stop=2)
    assert caught.value.code == "K02" and "step-3 could not be written" in caught.value.what


def pieces(ctx: RankContext, step: int) -> list[Box]:
    return [Box("w", (2 * ctx.world,), (2 * ctx.rank,), torch.full((2,), float(step + ctx.rank)))]


def savings(ctx: RankContext, run: Path, notes: list[str], patience: float = 600.0) -> Saving:
    from unisono.comm.mesh import Mesh, Shape
    from unisono.observe.span import Recorder

    mesh = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60))
    saver = Saver(run, ctx.rank, ctx.world, token="t", keep=3, patience=patience)
    return Saving(
        saver, mesh.world, torch.device("cpu"), notes.append if ctx.rank == 0 else lambda text: None
    )


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_whose_disk_lets_it_say_nothing_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Any, culprit: int, blocking: bool
) -> None:
    """Its folder refuses even the sign by which the others would learn of it."""
    true = Vote.announce

    def announce(self: Vote) -> None:
        if self.rank == culprit and "step-000002" in str(self.folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        true(self)

    monkeypatch.setattr(Vote, "announce", announce)
    notes: list[str] = []

    def live(ctx: RankContext) -> list[Path | None]:
        mine, found = savings(ctx, tmp_path, notes), []
        for step in (1, 2, 3):
            mine.settle()
            mine.save(step, pieces(ctx, step), {}, blocking=blocking, last=False, again=step + 1)
            found.append(mine.settle())
        return found

    begun = time.monotonic()
    threads(live, 3)
    assert time.monotonic() - begun < 60  # and not the patience of 600 s
    assert len(notes) == 1 and "step-2 could not be written" in notes[0] and "tried at step 3" in notes[0]
    assert names(tmp_path) == ["step-000001", "step-000003"]
    assert read_full(tmp_path / "checkpoints/step-000003")["w"].tolist() == [3, 3, 4, 4, 5, 5]


def test_a_rank_that_came_anew_settles_what_the_others_had_begun(tmp_path: Path, threads: Any) -> None:
    """A rank died while a save was in flight; who takes its place knows of none, and all go on together."""
    notes: list[str] = []

    def live(ctx: RankContext) -> Path | None:
        mine = savings(ctx, tmp_path, notes)
        if ctx.rank != 2:
            mine._saver.begin(5, pieces(ctx, 5), {}, attempt=1)
            mine._last.step, mine._last.again = 5, 6
        mine.settle()
        mine.save(5, pieces(ctx, 7), {}, blocking=False, last=False)
        return mine.settle()

    found = threads(live, 3)
    assert found == [tmp_path / "checkpoints/step-000005"] * 3
    assert read_full(found[0])["w"].tolist() == [7, 7, 8, 8, 9, 9]
    assert names(tmp_path) == ["step-000005"] and len(notes) == 1 and "step-5" in notes[0]


@given(
    steps=st.sets(st.integers(1, 60), min_size=1),
    keep=st.integers(1, 5),
    every=st.integers(0, 12),
    data=st.data(),
)
def test_retention_keeps_the_newest_and_those_of_certain_steps(
    steps: set[int], keep: int, every: int, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    gone = doomed(steps, newest, keep, every)
    left = steps - set(gone)
    assert newest in left and set(gone) <= steps and len(set(gone)) == len(gone)
    assert not every or all(step % every for step in gone)
    passing = {step for step in left if step == newest or not every or step % every}
    assert len(passing) == min(keep, len({s for s in steps if s == newest or not every or s % every}))
    past = sorted((s for s in steps if s <= newest and (s == newest or not every or s % every)), reverse=True)
    assert set(past[:keep]) <= left, "the newest of what led here"


def test_a_recipe_says_how_many_stay(tmp_path: Path) -> None:
    for keep, every, left in ((1, 0, [7]), (2, 4, [4, 6, 7]), (0, 0, [1, 2, 3, 4, 5, 6, 7])):
        told = recipe(tmp_path, save_every=1, steps=7, keep=keep, keep_every=every)
        run = tmp_path / f"{keep} {every}"
        play(told, "dp=1", 1, run)
        assert names(run) == [f"step-{step:06d}" for step in left]


def test_what_does_not_read_back_takes_the_place_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes bytes and keeps others: older checkpoints would make room for this one."""
    saver = Saver(tmp_path, keep=1)
    saver.save(1, [Box("w", (2,), (0,), torch.ones(2))], {})
    true = write.write_tensors

    def lossy(path: Path, tensors: Any) -> Any:
        written = true(path, tensors)
        os.truncate(path, 40)
        return written

    monkeypatch.setattr(write, "write_tensors", lossy)
    with pytest.raises(UsageError) as caught:
        saver.save(2, [Box("w", (2,), (0,), torch.zeros(2))], {})
    assert "does not read back: rank-00000.safetensors: has 40 bytes" in caught.value.what
    assert newest_whole(tmp_path) == latest(tmp_path) == tmp_path / "checkpoints/step-000001"


def test_sizes_are_told_in_words() -> None:
    assert no_room(3 << 30, 1536).endswith("No space left on device: needs 3.0 GiB, has 1.5 KiB")
    assert "has 7 bytes" in no_room(2048, 7)


def test_lines_of_metrics_wait_for_a_disk_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is missing, none is there twice, and the run is not ended by them."""
    import unisono.observe.files as files

    true, left = files.write_all, [0]

    def full(fd: int, data: Any) -> None:
        where = os.readlink(f"/proc/self/fd/{fd}")
        if where.endswith("metrics.jsonl"):
            left[0] += 1
            if left[0] in (2, 3, 4):
                os.write(fd, bytes(data)[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(fd, data)

    monkeypatch.setattr(files, "write_all", full)
    monkeypatch.setattr("unisono.train.watch.journal.EVERY", 0.0)
    heard: list[str] = []
    play(recipe(tmp_path, steps=8), "dp=1", 1, tmp_path / "run", heard=heard)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sum("cannot write into the run folder: No space left" in text for text in heard) == 1


def test_a_save_in_the_background_is_of_the_state_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    """Training changes its tensors before a byte of them is written."""
    changed, true = threading.Event(), write.write_tensors

    def late(path: Path, tensors: Any) -> Any:
        assert changed.wait(60)
        return true(path, tensors)

    def saved(ctx: RankContext) -> None:
        session, (piece,) = savings(ctx, tmp_path, []), pieces(ctx, 7)
        session.save(7, [piece], {}, blocking=False)
        piece.tensor.zero_()
        changed.set()
        session.settle(must=True)

    monkeypatch.setattr(write, "write_tensors", late)
    threads(saved, 1)
    folder = latest(tmp_path)
    assert folder is not None and read_full(folder)["w"].tolist() == [7.0, 7.0]

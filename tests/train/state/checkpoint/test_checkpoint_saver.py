"""Several ranks, as threads of one process: saves beside training, errors that reach every rank."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import unisono.train.state.checkpoint.write as writing
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver, latest, newest_whole, read_full, verify_folder

pytestmark = pytest.mark.timeout(120)
WORLD = 4


def savers(run_dir, token="start", **options):
    return [Saver(run_dir, rank, WORLD, token=token, patience=30, **options) for rank in range(WORLD)]


def pieces_of(rank, rows):
    """Rank r holds rows 2r and 2r+1 of an [8, 3] tensor, and a replica of a counter that rank 0 saves."""
    return [
        Box("w", (8, 3), (2 * rank, 0), rows),
        Box("step", (), (), torch.tensor(int(rows[0, 0]) // 100), saved=rank == 0),
    ]


def rows_of(rank, step):
    return 100 * step + torch.arange(6.0).reshape(2, 3) + 6 * rank


def every(function):
    """Call function(rank) in one thread per rank; their results or their errors."""
    with ThreadPoolExecutor(WORLD) as pool:
        futures = [pool.submit(function, rank) for rank in range(WORLD)]
        return [future.exception() or future.result() for future in futures]


def full(step):
    return 100 * step + torch.arange(24.0).reshape(8, 3)


@pytest.mark.parametrize("blocking", [True, False])
def test_all_ranks_save_again_and_again(tmp_path, blocking):
    ranks = savers(tmp_path, keep=2)

    def train(rank):
        rows = torch.empty(2, 3)
        found = []
        for step in (1, 2, 3):
            rows.copy_(rows_of(rank, step))
            found.append(ranks[rank].save(step, pieces_of(rank, rows), {"step": step}, blocking=blocking))
            rows.fill_(-1)  # training goes on in the same memory
        found.append(ranks[rank].wait())
        return found

    results = every(train)
    folder = tmp_path / "checkpoints/step-000003"
    assert all((folder in result) and (result[-1] == (None if blocking else folder)) for result in results)
    assert latest(tmp_path) == newest_whole(tmp_path) == folder
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-000002", "step-000003"]
    for step in (2, 3):
        where = tmp_path / f"checkpoints/step-{step:06d}"
        assert verify_folder(where) == [] and torch.equal(read_full(where)["w"], full(step))
        assert not list(where.glob("*.writing")) and not list(where.glob("rank-*.json"))


def test_the_same_step_is_replaced(tmp_path):
    ranks = savers(tmp_path)
    for value in (1, 7):
        every(lambda rank, value=value: ranks[rank].save(5, pieces_of(rank, rows_of(rank, value)), {}))
        assert torch.equal(read_full(latest(tmp_path))["w"], full(value))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.parametrize("culprit", range(WORLD))
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_at_once(
    tmp_path, monkeypatch, culprit, blocking
):
    ranks = savers(tmp_path)
    every(lambda rank: ranks[rank].save(1, pieces_of(rank, rows_of(rank, 1)), {}))
    true = writing.write_tensors

    def write(path, tensors):
        if path.name == f"rank-{culprit:05d}.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(path, tensors)

    monkeypatch.setattr(writing, "write_tensors", write)

    def train(rank):
        ranks[rank].save(2, pieces_of(rank, rows_of(rank, 2)), {}, blocking=blocking)
        ranks[rank].wait()

    errors = every(train)
    assert [error.code for error in errors] == ["K02"] * WORLD
    assert all("No space left" in error.what and "disk is full" in error.likely for error in errors)
    assert [error.rank for error in errors] == [culprit] * WORLD, "all name the one that could not"
    assert latest(tmp_path).name == "step-000001" and newest_whole(tmp_path) == latest(tmp_path)
    assert not list(tmp_path.glob("checkpoints/*.tmp-*/*.safetensors"))
    # The disk has room again: the next save of the same step goes through, and cleans up.
    monkeypatch.setattr(writing, "write_tensors", true)
    every(lambda rank: ranks[rank].save(2, pieces_of(rank, rows_of(rank, 2)), {}))
    assert torch.equal(read_full(latest(tmp_path))["w"], full(2))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_pieces_that_leave_a_gap_fail_on_all_ranks(tmp_path):
    ranks = savers(tmp_path)

    def train(rank):
        rows = rows_of(rank, 1)
        return ranks[rank].save(1, pieces_of(rank, rows[:1] if rank == 2 else rows), {})

    errors = every(train)
    assert errors[0].code == "K04" and "3 of its 24 elements" in errors[0].what
    assert all("3 of its 24 elements" in error.what for error in errors)
    assert latest(tmp_path) is None


def test_a_rank_that_never_comes_is_given_up(tmp_path):
    ranks = [Saver(tmp_path, rank, WORLD, token="t", patience=0.2) for rank in range(WORLD)]
    errors = every(lambda rank: rank == 3 or ranks[rank].save(1, pieces_of(rank, rows_of(rank, 1)), {}))
    assert [getattr(error, "code", error) for error in errors] == ["K02", "K02", "K02", True]
    assert "nothing was heard" in errors[0].what and latest(tmp_path) is None


def test_what_a_dead_run_left_is_not_taken_for_ours(tmp_path):
    """Three ranks of a run that died had written step 1; the run that is resumed saves step 1 again."""
    dead = savers(tmp_path, token="before")
    for rank in (1, 2, 3):
        dead[rank].save(1, pieces_of(rank, rows_of(rank, 9)), {}, blocking=False)
    marker = [f"checkpoints/step-000001.tmp-*/rank-{rank:05d}.json" for rank in (1, 2, 3)]
    done = threading.Event()
    while not all(list(tmp_path.glob(pattern)) for pattern in marker):
        done.wait(0.01)
    ranks = savers(tmp_path, token="after")
    every(lambda rank: ranks[rank].save(1, pieces_of(rank, rows_of(rank, 1)), {}))
    assert torch.equal(read_full(latest(tmp_path))["w"], full(1))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_an_error_in_the_background_is_raised_once_by_wait(tmp_path):
    (tmp_path / "run").write_text("")
    saver = Saver(tmp_path / "run")
    assert saver.save(1, [Box("w", (1,), (0,), torch.ones(1))], {}, blocking=False) is None
    with pytest.raises(UsageError) as caught:
        saver.wait()
    assert caught.value.code == "K02" and saver.wait() is None


def test_staging_memory_is_used_again(tmp_path):
    saver = Saver(tmp_path)
    tensor = torch.ones(3)
    saver.save(1, [Box("w", (3,), (0,), tensor)], {}, blocking=False)
    first = saver._staging[("w", (0,))]
    saver.save(2, [Box("w", (3,), (0,), tensor)], {}, blocking=False)
    assert saver._staging[("w", (0,))] is first
    saver.save(3, [Box("v", (3,), (0,), tensor)], {}, blocking=False)
    saver.wait()
    assert list(saver._staging) == [("v", (0,))]

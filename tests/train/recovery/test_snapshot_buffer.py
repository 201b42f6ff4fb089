"""Two snapshots alternate in a buffer, and one that was cut at any byte leaves the other as it was."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from unisono.train.recovery.snapshot_buffer import SnapshotBuffer
from unisono.train.state.checkpoint.boxes import Box


class Killed(Exception):
    """In the place of SIGKILL."""


def killed_after(count: int) -> Any:
    """Writes so many bytes, and no more."""
    left = count

    def write(file: int, buffers: Sequence[Any], at: int) -> int:
        nonlocal left
        data = b"".join(bytes(one) for one in buffers)[:left]
        done = os.pwrite(file, data, at)
        left -= done
        if not left:
            raise Killed
        return done

    return write


def boxes(value: int) -> list[Box]:
    """Some of each kind: a part of a matrix that is strided, a scalar, narrow and odd ones."""
    tensors = {
        "model/a": torch.full((3, 2), float(value)).t(),
        "optim/a/step": torch.tensor(float(value)),
        "model/b": torch.full((3,), value, dtype=torch.bfloat16),
        "model/c": torch.full((5,), value % 100, dtype=torch.uint8),
        "sync/d": torch.full((1, 3), value, dtype=torch.int64),
    }
    return [Box(name, (9,) * x.dim(), (1,) * x.dim(), x) for name, x in tensors.items()]


def value_of(found: Sequence[Box]) -> int:
    """Of which `boxes` these are."""
    value = int(next(box.tensor for box in found if box.name == "optim/a/step"))
    wanted = {box.name: box for box in boxes(value)}
    assert {box.name for box in found} == wanted.keys()
    for box in found:
        like = wanted[box.name]
        assert (box.full_shape, box.start, box.tensor.dtype) == (
            like.full_shape,
            like.start,
            like.tensor.dtype,
        )
        assert torch.equal(box.tensor, like.tensor)
    return value


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [os.memfd_create("test") for _ in range(2)]
    yield made
    for file in made:
        os.close(file)


def found(files: Sequence[int]) -> list[int]:
    """Steps of what a rank that comes later finds there; each is what was put."""
    kept = SnapshotBuffer(files).snapshots()
    for one in kept:
        assert one.sound() and one.state == {"val": [[1, one.step]]}
        assert value_of(one.boxes) == one.step
    return [one.step for one in kept]


def put(buffer: SnapshotBuffer, step: int) -> None:
    buffer.put(step, {"val": [[1, step]]}, boxes(step))


def test_two_are_kept_and_the_older_gives_way(files: list[int]) -> None:
    assert found(files) == []
    for step in (3, 4, 7):
        put(SnapshotBuffer(files), step)
    assert found(files) == [7, 4]


def test_one_that_is_cut_at_any_byte_leaves_the_other(files: list[int]) -> None:
    put(SnapshotBuffer(files), 6)
    put(SnapshotBuffer(files), 7)
    size, whole = os.fstat(files[0]).st_size, 0
    assert size > 300
    for count in range(1, 2 * size):
        try:
            put(SnapshotBuffer(files, killed_after(count)), 8)
        except Killed:
            assert found(files) in ([7], [8, 7])
            whole += found(files) == [8, 7]
        else:
            break
        SnapshotBuffer(files).drop(after=7)
        put(SnapshotBuffer(files), 8)  # whoever comes next goes on
        assert found(files) == [8, 7]
        SnapshotBuffer(files).drop(after=7)
        put(SnapshotBuffer(files), 6)
        assert found(files) == [7, 6]
    else:
        pytest.fail("no count let it finish")
    assert whole == 1  # with the last byte, and not before
    assert count > size


def test_what_changed_afterwards_is_found_out(files: list[int]) -> None:
    put(SnapshotBuffer(files), 3)
    file = next(one for one in files if os.fstat(one).st_size)
    at = 64 + 5
    byte = os.pread(file, 1, at)
    os.pwrite(file, bytes([byte[0] ^ 4]), at)
    (kept,) = SnapshotBuffer(files).snapshots()
    assert not kept.sound()
    os.pwrite(file, byte, at)
    assert kept.sound()


def test_a_damaged_table_is_no_snapshot(files: list[int]) -> None:
    put(SnapshotBuffer(files), 3)
    file = next(one for one in files if os.fstat(one).st_size)
    os.pwrite(file, b"\0", os.fstat(file).st_size - 1)
    assert SnapshotBuffer(files).snapshots() == []


def test_later_ones_are_forgotten_where_the_run_turns_back(files: list[int]) -> None:
    for step in (4, 5):
        put(SnapshotBuffer(files), step)
    SnapshotBuffer(files).drop(after=4)
    assert found(files) == [4]
    put(SnapshotBuffer(files), 5)
    assert found(files) == [5, 4]


def test_a_smaller_one_gives_its_room_back(files: list[int]) -> None:
    buffer, large = SnapshotBuffer(files), Box("model/x", (9000,), (0,), torch.ones(9000))
    for step in (1, 2):
        buffer.put(step, {}, [large])
    for step in (3, 4):
        put(buffer, step)
    assert max(os.fstat(file).st_size for file in files) < 9000
    assert found(files) == [4, 3]


def test_memory_that_is_full_leaves_the_newer_one(files: list[int]) -> None:
    def full(file: int, buffers: Sequence[Any], at: int) -> int:
        if at:
            raise OSError(28, "No space left on device")
        return os.pwritev(file, buffers, at)

    for step in (1, 2):
        put(SnapshotBuffer(files), step)
    with pytest.raises(OSError, match="No space"):
        put(SnapshotBuffer(files, full), 3)
    assert found(files) == [2]

"""Ranks give each other the state of a run: whatever the layouts, each gets what it wants or all are told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.train.recovery.peer_restore import Incomplete, PeerRestore
from unisono.train.recovery.snapshot_buffer import Snapshot
from unisono.train.state.checkpoint import Box
from unisono_contrib.comm.threads import run, store

FULL = torch.arange(48.0).view(8, 6)


def cut(rows: list[int], step: float = 0.0) -> list[list[Box]]:
    """The rows of FULL dealt to ranks, by how many each has; all of them where it is -1, none where it is -2."""
    at, boxes = 0, []
    for n in rows:
        if n == -2:
            boxes.append([])
            continue
        size = 8 if n < 0 else n
        begin = 0 if n < 0 else at
        at += max(n, 0)
        boxes.append([Box("model/w", (8, 6), (begin, 0), FULL[begin : begin + size] + step)])
    return boxes


def given_over(held: list[list[Box]], steps: list[int], wanted: list[list[Box]]) -> list[int]:
    def live(rank: int) -> int:
        mine = [Snapshot(steps[rank], {"who": rank}, held[rank], live=True)]
        memory = PeerRestore(rank, len(held), store(), mine, torch.device("cpu"))
        memory.load(wanted[rank])
        return memory.step

    return run(len(held), live)


def blank(boxes: list[list[Box]]) -> list[list[Box]]:
    return [[Box(b.name, b.full_shape, b.start, torch.zeros_like(b.tensor)) for b in some] for some in boxes]


@settings(max_examples=15, deadline=None)
@given(st.permutations([3, 5, 0]), st.permutations([1, 1, 6]))
def test_any_layout_is_made_of_any_other(old: list[int], new: list[int]):
    wanted = blank(cut(new))
    given_over(cut(old), [4, 4, 4], wanted)
    for some, right in zip(wanted, cut(new), strict=True):
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(some, right, strict=True))


def test_a_new_rank_and_one_that_is_behind_get_the_newest():
    held = [cut([-1], 100.0)[0], [], cut([-1], 7.0)[0]]
    wanted = blank(cut([-1, -1, -1]))
    assert given_over(held, [5, -1, 4], wanted) == [5, 5, 5]
    assert all(torch.equal(some[0].tensor, FULL + 100.0) for some in wanted)


def test_many_tensors_of_many_dtypes_go_in_one_message():
    """Parts of several boxes, some of an odd number of bytes, each at its place behind those before it."""
    dtypes = (torch.bfloat16, torch.float64, torch.int8, torch.float32, torch.int64, torch.bool)

    def boxes(rows: list[int], fill: bool) -> list[list[Box]]:
        dealt = []
        for begin, n in zip([0, rows[0]], rows, strict=True):
            some = []
            for number, dtype in enumerate(dtypes):
                whole = (FULL[:, : number + 1] + 7 * number).fmod(2 if dtype == torch.bool else 120).to(dtype)
                part = whole[begin : begin + n].clone()
                part = part if fill else torch.zeros_like(part)
                some.append(Box(f"model/{number}", tuple(whole.shape), (begin, 0), part))
            dealt.append(some)
        return dealt

    wanted = boxes([3, 5], fill=False)
    given_over(boxes([7, 1], fill=True), [2, 2], wanted)
    for some, right in zip(wanted, boxes([3, 5], fill=True), strict=True):
        for mine, one in zip(some, right, strict=True):
            assert torch.equal(mine.tensor, one.tensor), mine.name


def test_a_newer_step_without_one_of_the_tensors_is_not_taken():
    """Rank 1 was lost; the newest step lacks the tensor that it alone had, of which only the older one knows."""
    held = [[Box("model/a", (1,), (0,), torch.ones(1))], [Box("model/b", (1,), (0,), torch.ones(1))]]

    def live(rank: int) -> int:
        mine = [Snapshot(4, {}, held[rank])]
        newer = [Snapshot(5, {}, held[0])] if rank == 0 else []
        return PeerRestore(rank, 2, store(), [*newer, *mine], torch.device("cpu")).step

    assert run(2, live) == [4, 4]


def test_all_are_told_where_a_part_is_held_by_nobody():
    held = [cut([3])[0], []]
    with pytest.raises(Incomplete):
        given_over(held, [2, -1], blank(cut([4, 4])))

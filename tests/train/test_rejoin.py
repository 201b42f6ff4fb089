"""What a rank says that it holds when ranks meet anew: what it trains with, unless that is half an update, what lies on
its buffer, and what it keeps for others, if that is sound."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import context
from tests.train.small import recipe, started
from unisono.train.recovery.snapshot_buffer import Snapshot, SnapshotBuffer
from unisono.train.rejoin import CarriedState, _held
from unisono.train.state.checkpoint.boxes import Box
from unisono_contrib.comm import threads as on_threads

pytestmark = pytest.mark.timeout(60)


def put(step: int, *buffers: SnapshotBuffer) -> None:
    for buffer in buffers:
        buffer.put(step, {"of": "buffer"}, [Box("model/x", (2,), (0,), torch.full((2,), float(step)))])


class Kept:
    """What a rank keeps for others."""

    def __init__(self, *some: Snapshot) -> None:
        self.some = some

    def snapshots(self) -> list[Snapshot]:
        return list(self.some)


def said(folder: Path, whole: bool, steps: list[int], replicas: Any = None) -> list[tuple[int, bool]]:
    """(step, whether it is live) of what a rank says whose run is after step 0."""
    found: list[tuple[int, bool]] = []

    def play(rank: int) -> None:
        run, _, _ = started(context(0, 1), recipe(folder), "dp=1")
        run.whole = whole
        buffer = SnapshotBuffer.new()
        for step in steps:
            put(step, buffer)
        kept = CarriedState(run, [(2, 0.5)], [], {"why": 1})
        for one in _held(kept, buffer, replicas):
            found.append((one.step, one.live))
            if one.live:
                assert one.state["val"] == [(2, 0.5)] and one.state["bad"] == {"why": 1}
        buffer.close()

    on_threads.run(1, play)
    return found


def test_what_it_trains_with_counts_unless_an_update_is_under_way(tmp_path: Path) -> None:
    assert said(tmp_path, True, [0, 1]) == [(0, True), (1, False)], "of its step, not the snapshot"
    assert said(tmp_path, False, [0, 1]) == [(1, False), (0, False)]
    assert said(tmp_path, True, []) == [(0, True)]


def test_a_copy_that_is_not_sound_is_not_said(tmp_path: Path) -> None:
    box = Box("model/y", (2,), (0,), torch.ones(2))
    good, bad = Snapshot(3, {}, [box]), Snapshot(4, {}, [box], lambda: False)
    assert said(tmp_path, True, [1], Kept(good, bad)) == [(0, True), (1, False), (3, False)]
    assert replace(bad, sound=lambda: True).sound()

"""Ranks put snapshots of the same steps aside, seldom enough; of what is left, the newest covered step is taken."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tests.threads import context
from tests.train.small import recipe, started
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.build.build import Place
from unisono.train.recovery.peer_restore import Incomplete, PeerRestore
from unisono.train.recovery.snapshot_buffer import Snapshot, SnapshotBuffer
from unisono.train.recovery.snapshots import ROOM, SHARE, Holding, Snapshots, among, fits, lonely
from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.run_state import pieces_of
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads as on_threads

pytestmark = pytest.mark.timeout(120)


# Which step is taken ---------------------------------------------------------------------------------------------------


def half(rank: int, step: int, live: bool = False, sound: bool = True) -> Snapshot:
    """Half of a tensor, which only this rank holds."""
    box = Box("model/x", (4,), (2 * rank,), torch.full((2,), float(step)))
    return Snapshot(step, {"at": step}, [box], lambda: sound, live)


def meet(*held: Sequence[Snapshot]) -> list[PeerRestore]:
    """What each rank makes of what all hold."""
    store, cpu = HashStore(), torch.device("cpu")

    def one(rank: int) -> PeerRestore:
        return PeerRestore(rank, len(held), store, held[rank], cpu)

    return at_once(one, len(held))


def at_once(one: Callable[[int], Any], ranks: int) -> list[Any]:
    """Of ranks that only talk over a store."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


LIVE = (None, 5, 6)
KEPT = [*combinations((4, 5, 6), 2), (4,), (6,), ()]


def test_the_newest_step_of_which_all_is_held_is_taken_whoever_holds_it() -> None:
    ways = list(product(LIVE, KEPT))
    for first, second in product(ways, ways):
        held, steps = [], []
        for rank, (live, kept) in enumerate((first, second)):
            mine = [half(rank, live, live=True)] if live is not None else []
            held.append([*mine, *(half(rank, step) for step in kept if step != live)])
            steps.append({one.step for one in held[-1]})
        got = meet(*held)
        both, any_ = steps[0] & steps[1], steps[0] | steps[1]
        for rank, memory in enumerate(got):
            assert memory.step == max(both or any_, default=-1)
            assert memory.newest == max(any_, default=-1)
            serving = [who for who in (0, 1) if memory.step in steps[who]]
            assert memory.stood_in == [who for who in serving if (first, second)[who][0] != memory.step]
            assert memory.state["step"] == memory.step and (not serving or memory.state["at"] == memory.step)
            if not both:
                with pytest.raises(Incomplete):
                    PeerRestore(0, 1, HashStore(), held[rank], torch.device("cpu")).load(whole())


def whole() -> list[Box]:
    return [Box("model/x", (4,), (0,), torch.zeros(4))]


def test_a_snapshot_that_is_not_sound_is_passed_over() -> None:
    held = [
        [half(0, 6, live=True), half(0, 5), half(0, 4)],
        [half(1, 5, sound=False), half(1, 4)],
    ]
    for memory in meet(*held):
        assert (memory.step, memory.newest, memory.stood_in) == (4, 6, [0, 1])


def test_one_rank_alone_goes_on_from_what_it_left() -> None:
    box = Box("model/x", (4,), (0,), torch.arange(4.0))
    (memory,) = meet([Snapshot(3, {}, [box])])
    target = whole()
    assert memory.load(target) == {"step": 3}
    assert torch.equal(target[0].tensor, box.tensor)


# When they are made ----------------------------------------------------------------------------------------------------


class Memory(SnapshotBuffer):
    """Keeps a copy of all that is put there. before: called first."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before, self.kept = before, dict[int, dict[str, torch.Tensor]]()

    def put(self, step: int, state: Mapping[str, Any], boxes: Sequence[Box]) -> None:
        self.before()
        self.kept[step] = copy_of(boxes)

    def snapshots(self) -> list[Snapshot]:
        return []

    def drop(self, after: int) -> None:
        return


def place(rank: int, host: int = 0) -> Place:
    return Place(rank, 1, torch.device("cpu"), "gloo", timedelta(seconds=20), host=host)


def copy_of(boxes: Sequence[Box]) -> dict[str, torch.Tensor]:
    return {box.name: box.tensor.detach().clone() for box in boxes if box.saved and box.tensor.numel()}


def alone(
    folder: Path, buffer: SnapshotBuffer | None, every: int | None, plan: str = "dp=1"
) -> tuple[Run, Any, Snapshots]:
    run, feed, _ = started(context(0, 1), recipe(folder), plan)
    return (
        run,
        feed,
        Snapshots(run, Plan.parse(plan), place(0), buffer, every, lambda said: [said], pytest.fail),
    )


def test_an_update_waits_until_what_it_changes_was_put_aside(tmp_path: Path) -> None:
    def play(rank: int) -> None:
        waits = threading.Event()
        buffer = Memory(lambda: waits.wait(20.0))  # not before the next update wants to begin
        run, feed, snapshots = alone(tmp_path, buffer, 1)
        settle = snapshots.settle

        def told() -> None:
            waits.set()
            settle()

        snapshots.settle = told  # type: ignore[method-assign]
        wanted = {}
        for _ in range(3):
            train_step(run, feed.fetch(run.step, run.leaves))
            waits.clear()
            wanted[run.step] = copy_of(pieces_of(run))
            snapshots.stepped(0.1, {})
        settled = snapshots.settle
        settled()
        assert snapshots.take_stall()["snapshot_stall"] > 0 and snapshots.take_stall() == {}
        assert buffer.kept.keys() == wanted.keys() == {1, 2, 3}
        for step, tensors in wanted.items():
            assert buffer.kept[step].keys() == tensors.keys()
            assert all(torch.equal(buffer.kept[step][name], x) for name, x in tensors.items())

    on_threads.run(1, play)


def written_over(folder: Path, monkeypatch: pytest.MonkeyPatch, *, beside: bool) -> set[str]:
    """Names of the tensors of which the buffer kept what was written into them after the step, before it had read them:
    all that this rank has, and something that the policy keeps."""
    kept, extra = dict[str, torch.Tensor](), torch.zeros(3)
    monkeypatch.setattr(
        "unisono.train.recovery.snapshots.kept_of", lambda run: [Box("sync/x", (3,), (0,), extra)]
    )

    def play(rank: int) -> None:
        waits = threading.Event()
        buffer = Memory(lambda: waits.wait(20.0))
        run, feed, snapshots = alone(folder, buffer, 1)
        snapshots._beside = beside
        train_step(run, feed.fetch(run.step, run.leaves))
        boxes = [*pieces_of(run), Box("sync/x", (3,), (0,), extra), Box("model/statistic", (3,), (0,), extra)]
        monkeypatch.setattr(
            "unisono.train.recovery.snapshots.pieces_of", lambda run: [*pieces_of(run), boxes[-1]]
        )
        before = copy_of(boxes)
        snapshots.stepped(0.1, {})
        with torch.no_grad():
            for box in boxes:
                box.tensor.add_(1)
        waits.set()
        snapshots.settle()
        kept.update({name: x for name, x in buffer.kept[1].items() if not torch.equal(x, before[name])})

    on_threads.run(1, play)
    return set(kept)


def test_what_others_than_the_optimiser_write_is_copied_before_it_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and the optimiser's own are read where they lie, for an update waits; all else may change at once."""
    lies = written_over(tmp_path, monkeypatch, beside=True)
    assert (
        lies and all(name.startswith(("model/", "optim/")) for name in lies) and "model/statistic" not in lies
    )
    assert written_over(tmp_path, monkeypatch, beside=False) == set()


def test_what_was_put_aside_of_a_way_that_was_left_is_dropped(tmp_path: Path) -> None:
    dropped: list[int] = []

    def play(rank: int) -> None:
        buffer = Memory()
        buffer.drop = lambda after: dropped.append(after)  # type: ignore[method-assign]
        run, _, snapshots = alone(tmp_path, buffer, 1)
        run.step = 3
        snapshots.turned_back()

    on_threads.run(1, play)
    assert dropped == [0, 3]


def test_every_so_many_steps(tmp_path: Path) -> None:
    def play(rank: int) -> None:
        buffer = Memory()
        run, feed, snapshots = alone(tmp_path, buffer, 3)
        for _ in range(8):
            train_step(run, feed.fetch(run.step, run.leaves))
            snapshots.stepped(0.1, {})
        snapshots.settle()
        assert sorted(buffer.kept) == [3, 6]

    on_threads.run(1, play)


def test_how_often_follows_what_one_takes_of_the_slowest_rank(tmp_path: Path) -> None:
    def play(rank: int) -> None:
        buffer = Memory()
        run, feed, _ = started(context(0, 1), recipe(tmp_path), "dp=1")
        said: list[Any] = []

        def agree(own: Any) -> list[Any]:
            said.append(own)
            return [own, [0, 1 << 60, 0, [1]]] if isinstance(own, list) else [own, 0.0265 / SHARE]

        snapshots = Snapshots(run, Plan.parse("dp=1"), place(0), buffer, None, agree, pytest.fail)
        for _ in range(9):
            train_step(run, feed.fetch(run.step, run.leaves))
            snapshots.stepped(1e4, {})
        snapshots.settle()
        assert snapshots.every == 6 and round(0.0265 / SHARE) == 5  # no more than the share
        assert sorted(buffer.kept) == [1, 2, 3, 9]  # three to measure
        (own, free, *_), cost = said
        assert own == sum(x.numel() * x.element_size() for x in buffer.kept[1].values()) and free > 0
        assert 0 < cost < 1

    on_threads.run(1, play)


def test_by_themselves_where_one_rank_holds_a_part_alone_and_there_is_room(tmp_path: Path) -> None:
    def every(
        plan: str, buffer: SnapshotBuffer | None = None, free: int = 1 << 60, hosts: int = 1
    ) -> list[int]:
        parsed = Plan.parse(plan)
        ranks = parsed.world

        def one(rank: int) -> int:
            run, *_ = started(context(rank, ranks), recipe(tmp_path), plan)

            def agree(said: Any) -> list[Any]:
                other = said[3] if parsed.dp > 1 else [9]
                return [said, [said[0], free, hosts - 1, other]]

            return Snapshots(run, parsed, place(rank), buffer, None, agree, pytest.fail).every

        return on_threads.run(ranks, one)

    assert every("dp=1", Memory()) == [1]
    assert every("pp=2", Memory()) == [1, 1]
    assert every("dp=1") == [0]
    assert every("dp=1", Memory(), free=1000) == [0]
    assert every("dp=2", Memory()) == [0, 0]
    assert every("dp=1 offload=optimizer", Memory()) == [0]
    assert every("dp=2", Memory(), hosts=2) == [0, 0]


def test_what_the_ranks_of_one_host_alone_hold_would_be_lost_with_it() -> None:
    def ranks(*held: tuple[int, int]) -> list[Holding]:
        return [Holding(10, 100.0, host, [part]) for host, part in held]

    assert lonely(ranks((0, 0))) and lonely(ranks((0, 0), (0, 1))) and lonely(ranks((0, 0), (1, 1)))
    assert not lonely(ranks((0, 0), (0, 0))), "one host: its loss ends the run"
    assert lonely(ranks((0, 0), (0, 0), (1, 1), (1, 1))), "each host holds a stage"
    assert not lonely(ranks((0, 0), (0, 1), (1, 0), (1, 1))), "each host holds all"


def test_copies_of_another_host_need_room_too() -> None:
    def room(free: float, *hosts: int) -> bool:
        return fits([Holding(10, free, host, [rank]) for rank, host in enumerate(hosts)])

    assert room(20 / ROOM, 0) and not room(19 / ROOM, 0)
    assert room(40 / ROOM, 0, 1) and not room(39 / ROOM, 0, 1)
    assert room(60 / ROOM, 0, 0, 1) and not room(59 / ROOM, 0, 0, 1), "the copies of the larger host"


def test_asked_for_where_nobody_could_keep_them_is_refused(tmp_path: Path) -> None:
    def play(rank: int) -> None:
        with pytest.raises(UsageError, match="snapshot_every=2") as refused:
            alone(tmp_path, None, 2)
        assert refused.value.code == "L09"
        assert alone(tmp_path, None, 0)[2].every == 0

    on_threads.run(1, play)


def test_memory_that_is_full_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    def play(rank: int) -> None:
        def full() -> None:
            raise OSError(28, "No space left on device")

        run, feed, _ = started(context(0, 1), recipe(tmp_path), "dp=1")
        told: list[str] = []
        snapshots = Snapshots(
            run, Plan.parse("dp=1"), place(0), Memory(full), 1, lambda said: [said], told.append
        )
        for _ in range(3):
            train_step(run, feed.fetch(run.step, run.leaves))
            snapshots.stepped(0.1, {})
        assert run.step == 3
        assert len(told) == 1 and "No space left" in told[0]

    on_threads.run(1, play)


def test_what_ranks_say_is_kept_apart_by_round() -> None:
    store = HashStore()

    def one(rank: int) -> list[list[int]]:
        agree = among(store, rank, 3)
        return [agree(10 * turn + rank) for turn in range(3)]

    assert at_once(one, 3) == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3

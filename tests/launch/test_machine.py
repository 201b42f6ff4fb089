"""The state machine of a run, by itself: what always holds, and what each loss leads to."""

import random
from typing import Any

import pytest

from tests.launch.simulated import ECHO, KILLED, RAISED, World, drawn, ready, started, trained
from unisono.launch.run import commands, events
from unisono.launch.run.ending import ALIKE_GRACE, CUT_GRACE, ECHO_GRACE, STACK_GRACE
from unisono.launch.run.membership import LIMIT, Role, RunSpread, Tries
from unisono.launch.run.state import LEAVE, STOPPED, Phase, RunTerms, begin
from unisono.spec.errors import HangError, Interrupted, Stopped, UserCodeError

SEQUENCES = 10_000


def shrinking(room: int, settled: str) -> RunSpread | None:
    return RunSpread(f"dp={min(room, 4)}", min(room, 4)) if room else None


def random_world(order: random.Random) -> World:
    ranks = order.randint(1, 4)
    beside = tuple(order.choice([*Role][2:]) for _ in range(order.choice((0, 0, 2))))
    roles = (Role.SERVER,) + (Role.TRAINER,) * (ranks - 1) + beside if beside else ()
    terms = RunTerms(
        "here", RunSpread("dp", ranks, roles=roles), order.choice((None, shrinking)), order.random() < 0.8,
        order.choice((None, 5.0)), order.choice((30.0, 300.0)),
    )  # fmt: skip
    world = World(begin(terms))
    for host in range(order.choice((1, 1, 2))):
        world.feed(events.HostUp(host, f"h{host}", order.randint(1, 4)))
    return world


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_a_run_ends_or_goes_on(part: int) -> None:
    """`World` holds each answer to what must always be so. Without more disturbance a run then comes to its end: all
    workers are gone, or it waits for a host, or all that it has called meet."""
    for seed in range(SEQUENCES // 4 * part, SEQUENCES // 4 * (part + 1)):
        order = random.Random(seed)
        world = random_world(order)
        for event, _ in zip(drawn(order, world), range(order.randint(5, 30)), strict=False):
            if order.random() < 0.6:
                world.turn()
            if order.random() < 0.3:
                ready(world)
            world.now += order.choice((0.0, 0.05, 0.5, 3.0))
            world.happen(event)
        assert world.settle(), (seed, world.state)
        assert world.state.is_done() or world.state.phase is Phase.WAITING, (seed, world.state)
        assert not world.state.is_done() or not world.alive(), seed


@pytest.mark.parametrize("beside", [(), (Role.SPARE, Role.SPARE), (Role.SAMPLER,)])
def test_a_run_that_loses_all_trainers_meets_or_ends(beside: tuple[Role, ...]) -> None:
    for seed in range(300):
        order, world = random.Random(seed), trained(4, 6, beside, recovers=True)
        for _ in range(order.randint(1, 2 * LIMIT)):
            victims = [one.number for one in world.state.members() if one.status is None]
            order.shuffle(victims)
            for victim in victims:
                world.happen(events.Exited(victim, KILLED))
                if order.random() < 0.5:
                    world.turn()
            for _ in range(5):
                world.turn()
                world.feed(events.Tick())
            assert world.state.phase in (Phase.MEETING, Phase.OVER)
            if order.random() < 0.5:
                ready(world)
        if world.state.phase is Phase.OVER:
            assert not world.state.tries.may() and world.settle()


# Losses.


def test_one_that_is_lost_is_replaced_and_the_others_are_called() -> None:
    world = trained(recovers=True)
    done = world.feed(events.Exited(2, KILLED))
    (regroup,) = (one for one in done if isinstance(one, commands.Regroup))
    (spawn,) = (one for one in done if isinstance(one, commands.Spawn))
    assert regroup.epoch == 1 and {n: call.rank for n, call in regroup.calls.items()} == {1: 0, 3: 2, 4: 3}
    assert spawn.joins and (spawn.meeting.rank, spawn.index, spawn.meeting.epoch) == (1, 1, 1)
    assert world.shown[-1]["lost"] == {1: "killed by SIGKILL"} and world.shown[-1]["born"] == [1]
    assert not [one for one in done if isinstance(one, commands.Kill)]
    world.turn()
    ready(world, step=9)
    met = next(event for event in world.shown if "met" in event)
    assert met == {"kind": "members", "epoch": 1, "met": 9, "ranks": 4, "plan": "dp"}
    assert world.state.phase is Phase.RUNNING


def test_two_that_are_lost_in_one_step_cost_nobody_else() -> None:
    world = trained(recovers=True)
    world.feed(events.Exited(2, KILLED))
    world.feed(events.Exited(3, KILLED))
    assert world.state.epoch == 2 and world.killed == set() and world.state.losses == 2
    assert [one.number for one in world.state.members()] == [1, 5, 6, 4]


@pytest.mark.parametrize(("backend", "kept"), [("gloo", 1), ("nccl", 0)])
def test_ranks_on_gpus_that_wait_for_who_is_gone_begin_anew(backend: str, kept: int) -> None:
    """A kernel of NCCL waits for ever, and ends with its process alone."""
    world = started(2, recovers=True)
    world.turn()
    world.feed(events.Said(1, {"kind": "start", "backend": backend}))
    ready(world)
    world.feed(events.Exited(2, KILLED))
    assert [one.number for one in world.state.members()] == ([1, 3] if kept else [3, 4])
    assert world.killed == (set() if kept else {1})


def test_all_begin_anew_where_one_is_lost_before_all_train() -> None:
    world = started(2, recovers=True)
    world.turn()
    world.feed(events.Ready(1, 0))
    world.feed(events.Exited(2, KILLED))
    assert world.killed == {1} and [one.number for one in world.state.members()] == [3, 4]


@pytest.mark.parametrize("status", [KILLED, 7])
def test_a_loss_that_nobody_replaces_ends_the_run(status: int) -> None:
    world = trained(recovers=status > 0)  # one that left by itself would do so again
    world.feed(events.Exited(3, status, "a.py:3 in f"))
    world.now += ALIKE_GRACE
    world.feed(events.Tick())
    error = world.state.error
    assert isinstance(error, UserCodeError) and (error.rank, error.code, error.where) == (
        2,
        "R02",
        "a.py:3 in f",
    )
    assert world.killed == {1, 2, 4} and world.settle()


def test_a_run_that_makes_no_step_is_given_up() -> None:
    world = trained(2, recovers=True)
    for _ in range(LIMIT):
        world.happen(events.Exited(world.state.group[1], KILLED))
        assert world.state.phase is Phase.MEETING
        world.turn()
    world.happen(events.Exited(world.state.group[1], KILLED))
    assert world.settle() and world.state.error is not None and world.state.error.rank == 1
    assert world.state.losses == LIMIT


def test_losses_of_each_rank_are_counted_by_themselves() -> None:
    tries = Tries()
    for rank in [*range(8)] * (LIMIT - 1) + [3]:
        assert tries.may()
        tries = tries.lost([rank])
    assert not tries.may()  # rank 3 once too often
    tries = tries.stepped(1)
    assert tries.may() and tries.stepped(1) is tries  # the same step again is no progress
    assert tries.lost([*range(8)]).may()  # or all at once


# Who is to blame.


def test_an_echo_waits_for_the_true_failure() -> None:
    world = trained()
    world.feed(events.Failed(1, ECHO))
    world.now += ECHO_GRACE / 2
    world.feed(events.Failed(3, RAISED))
    world.now += ALIKE_GRACE
    world.feed(events.Tick())
    error = world.state.error
    assert isinstance(error, UserCodeError) and (error.rank, error.what) == (2, "ValueError")
    assert error.likely == "ranks 0, 1, 3 were stopped because of it"


def test_what_all_raise_is_blamed_on_none() -> None:
    world = trained(3)
    for number in (1, 2, 3):
        world.feed(events.Failed(number, RAISED))
    world.feed(events.Tick())
    assert world.state.error is not None and "every rank raised it" in world.state.error.likely


def test_a_cut_between_two_lets_all_meet() -> None:
    world = trained(recovers=True)
    world.feed(events.Missed(1, 0))
    world.now += CUT_GRACE
    world.feed(events.Tick())
    assert world.state.epoch == 1 and world.shown[-1]["lost"] == {} and world.killed == set()


def test_a_death_within_the_grace_of_a_cut_is_the_cause() -> None:
    world = trained(recovers=True)
    world.feed(events.Missed(1, 0))
    world.feed(events.Exited(2, KILLED))
    world.now += CUT_GRACE
    world.feed(events.Tick())
    assert world.state.epoch == 1
    world.feed(events.Missed(3, 0))  # it was said before it heard of the meeting
    assert world.state.verdict_at is None


def test_one_that_says_nothing_is_a_hang_and_its_stack_is_read() -> None:
    world = trained(silence=30.0)
    world.now += 29.0
    for number in (1, 2, 4):
        world.feed(events.Said(number, {"kind": "note"}))
    world.now += 1.0
    (ask,) = world.feed(events.Tick())
    assert ask == commands.AskStacks((1, 2, 3, 4))
    world.now += STACK_GRACE
    assert commands.ReadStacks((1, 2, 3, 4)) in world.feed(events.Tick())
    world.turn()
    assert isinstance(world.state.error, HangError) and world.settle()


def hang(rank: int) -> dict[str, Any]:
    return {**RAISED, "kind": "HangError", "what": "stands", "code": "H01", "rank": rank}


def test_one_that_stands_still_is_replaced_once_after_a_step() -> None:
    world = trained(recovers=True)
    world.feed(events.Stepped(1, 4))
    world.feed(events.FoundHang(1, hang(1), 0))
    assert world.killed == {2}
    world.turn()
    assert world.state.epoch == 1
    world.feed(events.FoundHang(1, hang(1), 0))  # of the epoch before
    assert world.state.phase is not Phase.OVER
    world.turn()
    ready(world, 4)
    world.feed(events.FoundHang(1, hang(1), 1))  # after the same step again
    assert isinstance(world.state.error, HangError)


def test_a_stop_by_a_signal_counts_when_it_lasts() -> None:
    world = trained(recovers=True)
    world.feed(events.Frozen(2, True))
    world.now += STOPPED / 2
    world.feed(events.Frozen(2, False))
    world.now += STOPPED
    assert not world.feed(events.Tick())
    world.feed(events.Frozen(2, True))
    assert world.state.next_deadline() == world.now + STOPPED
    world.now += STOPPED
    assert world.feed(events.Tick()) == [commands.Kill(2)] and not world.feed(events.Tick())


def test_a_stop_of_the_whole_run_is_nobodys_silence() -> None:
    world = trained(silence=30.0)
    world.now += 1000.0
    world.feed(events.Resumed())
    assert not world.feed(events.Tick())


# Ends.


def test_all_leave_together_once_all_have_reported() -> None:
    world = trained(2)
    world.feed(events.Finished(1, {"x": 1}))
    assert world.told == []
    world.feed(events.Finished(2, None))
    assert world.told == [(1, "leave"), (2, "leave")] and world.state.next_deadline() == world.now + LEAVE
    world.feed(events.Exited(1, 0))
    world.feed(events.Exited(2, 0))
    assert world.state.is_done() and world.state.error is None
    assert [one.result for one in world.state.members()] == [{"x": 1}, None]


def test_one_that_does_not_leave_is_killed() -> None:
    world = trained(2)
    for number in (1, 2):
        world.feed(events.Finished(number, None))
    world.feed(events.Exited(1, 0))
    world.now += LEAVE
    assert world.feed(events.Tick()) == [commands.Kill(2)]
    assert world.settle() and world.state.error is None


def test_a_stop_is_told_to_all_and_the_grace_ends_it() -> None:
    world = trained(2, grace=5.0)
    world.feed(events.Signalled("terminate"))
    assert world.told == [(1, "stop"), (1, "hurry"), (2, "stop"), (2, "hurry")]
    assert world.shown[-1] == {"kind": "stopping", "how": "terminate"} and world.state.phase is Phase.STOPPING
    world.now += 5.0
    world.feed(events.Tick())
    assert isinstance(world.state.error, Stopped) and world.settle()


def test_a_second_interrupt_ends_at_once() -> None:
    world = trained(2)
    world.feed(events.Signalled("interrupt"))
    assert world.state.phase is Phase.STOPPING
    world.feed(events.Signalled("interrupt"))
    assert isinstance(world.state.error, Interrupted) and world.killed == {1, 2}


def test_a_signal_before_the_ranks_are_there_ends_the_import() -> None:
    world = started(2)
    assert commands.OnHost(0, "end") in world.feed(events.Signalled("interrupt"))
    assert isinstance(world.state.error, Interrupted) and world.settle()


def test_one_that_comes_while_all_stop_is_told() -> None:
    world = trained(2, recovers=True)
    world.feed(events.Signalled("interrupt"))
    world.feed(events.Exited(2, KILLED))
    assert world.told[-1] == (3, "stop") and world.state.phase is Phase.STOPPING


# Hosts.


def test_a_host_is_lost_with_all_its_workers_and_the_run_shrinks() -> None:
    world = World(begin(RunTerms("here", RunSpread("dp=4", 4), shrinking, recovers=True)))
    world.feed(events.HostUp(0, "here", 2))
    assert world.state.phase is Phase.WAITING and not world.spawned
    world.feed(events.HostUp(1, "b", 2))
    world.turn()
    ready(world)
    world.happen(events.HostDown(1))
    assert world.state.spread.ranks == 2 and [one.number for one in world.state.members()] == [1, 2]
    assert world.shown[-1]["lost"] == dict.fromkeys((2, 3), "host b is gone")
    assert (
        world.shown[-1]["hosts"] == {"gone": ["b"], "joined": []}
        and world.shown[-1]["why"] == "host b is gone"
    )
    ready(world)
    world.feed(events.HostUp(1, "b", 2))
    world.feed(events.HostPrepared(1))
    assert world.told == [(1, "move"), (2, "move")]
    for number in (1, 2):
        world.feed(events.WorkerPaused(number, 1))
    assert world.state.spread.ranks == 4 and world.state.losses == 1 and "lost" not in world.shown[-1]


def test_a_host_that_is_lost_during_a_move_to_it_is_not_moved_to() -> None:
    world = World(begin(RunTerms("here", RunSpread("dp=2", 2), shrinking, recovers=True)))
    world.feed(events.HostUp(0, "here", 2))
    world.turn()
    ready(world)
    world.feed(events.HostUp(1, "b", 2))
    world.feed(events.HostPrepared(1))
    world.happen(events.HostDown(1))
    for number in (1, 2):
        world.feed(events.WorkerPaused(number, 0))
    assert world.state.spread.ranks == 2 and world.state.epoch == 1 and world.killed == set()


def test_a_host_whose_loss_nobody_makes_good_is_named() -> None:
    world = World(begin(RunTerms("here", RunSpread("dp=2", 2), recovers=True)))
    world.feed(events.HostUp(0, "here", 1))
    world.feed(events.HostUp(1, "b", 1))
    world.turn()
    ready(world)
    world.happen(events.HostDown(1))
    assert world.state.error is not None and world.state.error.what == "host b is gone, and with it rank 1"
    assert world.settle()


def test_a_fork_server_that_is_killed_is_started_anew() -> None:
    world = trained(2, recovers=True)
    world.happen(events.HostDown(0, "killed by SIGKILL"))
    assert world.state.phase is Phase.WAITING and world.state.epoch == 1
    assert world.shown[-1] == {
        "kind": "members",
        "epoch": 1,
        "lost": {"helper": "killed by SIGKILL"},
        "born": [0, 1],
    }
    world.turn()
    assert [one.number for one in world.state.members()] == [3, 4]
    spawn = next(one for one in reversed(world.asked) if isinstance(one, commands.Spawn))
    assert not spawn.joins and spawn.meeting.epoch == 1


def test_a_worker_that_cannot_be_forked_ends_the_run_and_the_others() -> None:
    world = started(3)
    world.happen(events.Born(1))
    world.happen(events.HostFailed(0, RAISED, 2))
    assert world.state.phase is Phase.OVER and not world.state.is_done()
    world.happen(events.Born(3))  # its order was under way
    assert commands.Kill(3) in world.asked
    assert world.settle() and world.state.is_done()


# Roles.


def test_a_spare_takes_the_place_of_a_lost_trainer() -> None:
    world = trained(2, 3, (Role.SPARE,), recovers=True)
    assert world.state.beside == (3,)
    done = world.feed(events.Exited(2, KILLED))
    (regroup,) = (one for one in done if isinstance(one, commands.Regroup))
    assert regroup.calls[3].rank == 1 and world.state.group == (1, 3)
    assert world.state.workers[3].role is Role.TRAINER
    assert world.state.beside == (4,) and world.state.workers[4].role is Role.SPARE


@pytest.mark.parametrize("role", [Role.CLIENT, Role.SAMPLER])
def test_who_stands_beside_the_group_is_replaced_without_a_meeting(role: Role) -> None:
    world = trained(2, 3, (role,), recovers=True)
    world.feed(events.Exited(3, KILLED))
    assert world.state.epoch == 0 and world.state.beside == (4,) and world.state.workers[4].role is role
    world.feed(events.Exited(1, KILLED))
    assert world.state.epoch == 1 and world.state.beside == (4,), "a loss in the group leaves it where it is"


@pytest.mark.parametrize("lost", [(3,), (4,), (3, 4)])
def test_who_lives_beside_the_group_keeps_its_number(lost: tuple[int, ...]) -> None:
    """A sampler is called by its number: a new process comes under that of the one that is lost, and no other."""
    world = trained(2, 4, (Role.SAMPLER, Role.SAMPLER), recovers=True)
    calls = {3: 0, 4: 1}
    for worker in lost:
        for spawn in (
            one for one in world.feed(events.Exited(worker, KILLED)) if isinstance(one, commands.Spawn)
        ):
            calls[spawn.worker] = spawn.meeting.rank - 2
    alive = [number for number in world.state.beside if world.state.workers[number].is_at_work]
    assert sorted(calls[number] for number in alive) == [0, 1] and not set(lost) & set(alive)

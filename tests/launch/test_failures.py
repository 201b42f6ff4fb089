"""What goes wrong in a rank is named once, and the others are gone within seconds."""

import ctypes
import errno
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World
from unisono.launch import wire
from unisono.launch.fork_server import ForkServer
from unisono.launch.rank import main as rank
from unisono.launch.worker_handle import line_pairs
from unisono.spec.errors import ConfigProblems, HangError, Problem, UnisonoError, UsageError, UserCodeError

pytestmark = pytest.mark.timeout(120)


def one_raises(ctx, after):
    for _ in range(after):
        dist.barrier()
    if ctx.rank == 1:
        try:
            raise ValueError("the data ended")
        finally:
            dist.destroy_process_group()  # the others notice before we have spoken
    dist.all_reduce(torch.ones(1))


def all_raise(ctx):
    raise ValueError("no weights here")


def one_is_killed(ctx):
    dist.barrier()
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_leaves(ctx):
    if ctx.rank == 0:
        os._exit(7)
    dist.barrier()


def one_exits(ctx):
    if ctx.rank == 0:
        sys.exit(3)
    dist.barrier()


def one_crashes(ctx):
    if ctx.rank == 1:
        ctypes.string_at(0)
    dist.barrier()


def one_refuses(ctx):
    if ctx.rank == 0:
        raise UsageError("no such thing", where="here", fix="this", code="C07")
    dist.barrier()


def one_finds_problems(ctx):
    if ctx.rank == 0:
        raise ConfigProblems([Problem("C01", "first", fix="a"), Problem("C02", "second", fix="b")])
    dist.barrier()


def load_next_batch():
    reads, _ = os.pipe()
    os.read(reads, 1)  # for ever, signals or not


def one_sleeps(ctx):
    dist.barrier()
    if ctx.rank == 1:
        load_next_batch()
    dist.all_reduce(torch.ones(1))


def one_eats_memory(ctx):
    if ctx.rank == 1:
        torch.empty(1 << 58)
    dist.barrier()


def returns_no_json(ctx):
    return {"x": torch.ones(1)}


def reports_pids(ctx, path):
    with open(f"{path}/{ctx.rank}", "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    if ctx.rank == 0:
        raise ValueError("enough")
    child = os.fork()
    if child == 0:
        signal.pause()
    signal.pause()


def test_a_rank_that_raises_is_named_with_its_line(world: World) -> None:
    with pytest.raises(UserCodeError, match="ValueError: the data ended") as caught:
        world(one_raises, 4, after=2)
    error = caught.value
    assert (error.rank, error.code, error.exit) == (1, "R01", 1)
    assert "test_failures.py" in error.where and "one_raises" in error.where
    assert "ranks 0, 2, 3" in error.likely
    assert "".join(error.__notes__).count("Traceback") == 1


def test_what_all_raise_is_blamed_on_none(world: World) -> None:
    with pytest.raises(UserCodeError, match="no weights here") as caught:
        world(all_raise, 3)
    assert (
        caught.value.likely
        == "every rank raised it: not one machine, but the code or the data that all share"
    )


def test_a_killed_rank_is_named_not_those_who_miss_it(world: World) -> None:
    with pytest.raises(UserCodeError, match="killed by SIGKILL") as caught:
        world(one_is_killed, 4)
    assert (caught.value.rank, caught.value.code, caught.value.exit) == (2, "R02", 137)
    assert "memory" in caught.value.likely


def test_leaving_without_a_word_is_a_failure(world: World) -> None:
    with pytest.raises(UserCodeError, match="left with status 7") as caught:
        world(one_leaves, 2)
    assert (caught.value.rank, caught.value.code) == (0, "R02")


def test_sys_exit_is_a_failure(world: World) -> None:
    with pytest.raises(UserCodeError, match="SystemExit") as caught:
        world(one_exits, 2)
    assert caught.value.rank == 0


def test_a_crash_in_native_code_shows_where(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserCodeError, match="SIGSEGV") as caught:
        world(one_crashes, 2)
    assert caught.value.rank == 1 and caught.value.exit == 139
    assert "one_crashes" in capfd.readouterr().err


def test_our_errors_keep_class_code_and_exit(world: World) -> None:
    with pytest.raises(UsageError, match="no such thing") as caught:
        world(one_refuses, 2)
    error = caught.value
    assert (error.code, error.exit, error.where, error.fix, error.rank) == ("C07", 2, "here", "this", 0)


def test_all_problems_cross(world: World) -> None:
    with pytest.raises(ConfigProblems) as caught:
        world(one_finds_problems, 2)
    assert [problem.code for problem in caught.value.problems] == ["C01", "C02"]


def test_a_hang_names_the_rank_that_others_wait_for(world: World) -> None:
    with pytest.raises(HangError, match="no word from rank 1 for 2 s; ranks 0, 2, 3 wait") as caught:
        world(one_sleeps, 4, timeout=2.0)
    assert caught.value.exit == 6 and "load_next_batch" in caught.value.where


def test_no_memory_is_exit_5(world: World) -> None:
    with pytest.raises(Exception, match=r"(?i)memory|overflow") as caught:
        world(one_eats_memory, 2)
    assert caught.value.exit == 5


def test_a_result_that_is_no_json_is_an_error(world: World) -> None:
    with pytest.raises(UnisonoError, match="not JSON serializable"):
        world(returns_no_json, 2, group=False)


def test_nobody_stays_neither_ranks_nor_what_they_started(world: World, tmp_path) -> None:
    with pytest.raises(UserCodeError, match="enough"):
        world(reports_pids, 3, path=str(tmp_path))
    # What was killed may stay a moment as a zombie, until init has heard of it.
    until = time.monotonic() + 20
    for file in tmp_path.iterdir():
        while _alive(int(file.read_text())):
            assert time.monotonic() < until, "somebody stayed"


def _alive(group: int) -> bool:
    """Whether a process of the group is there, zombies too."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_nursery_survives_its_runs(world: World) -> None:
    for after in range(3):
        with pytest.raises(UserCodeError, match="the data ended"):
            world(one_raises, 2, after=after)


def test_an_entry_that_does_not_exist_is_one_clear_error() -> None:
    with ForkServer("unisono.spec.errors:nothing") as nursery:
        outcome = nursery.run({}, ranks=2)
    assert isinstance(outcome.error, UsageError) and "no function nothing" in outcome.error.what
    with ForkServer("unisono.no_such_module:nothing") as nursery:
        outcome = nursery.run({}, ranks=2)
    assert outcome.error is not None and "no_such_module" in outcome.error.what


def test_a_rank_that_fails_before_its_entry_function_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (store, events, output), theirs = line_pairs()
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(rank.body.transport, "choose", _no_descriptor)
        order = {"timeout": None, "leads": "", "epoch": 0, "rank": 0, "world": 1, "present": 1, "local_rank": 0,
                 "local_world": 1, "spread": {}, "threads": 1, "backend": "gloo", "serves": None, "joins": False,
                 "token": "", "recovers": False}  # fmt: skip
        rank.live(rank.SeatEnds(0, theirs[0], theirs[1], theirs[2]), order, lambda *_: {}, {}, None)
    for fd in theirs:
        os.close(fd)
    with store, events:
        frames, said = wire.Frames(), list[dict[str, Any]]()
        while not said:
            said += map(wire.event, frames.feed(events.recv(1 << 16)))
        events.sendall(wire.frame(wire.dumps({"kind": "leave"})))
        os.close(output)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert said[0]["kind"] == "error" and "too many open files" in said[0]["error"]["what"]


def _no_descriptor(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

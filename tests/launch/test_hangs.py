"""Whoever keeps the others waiting is named, with its line, and everybody leaves; see `hangs` for the cases."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.launch.hangs import CASES, PROGRAM, ROOT, Case, left_of, play
from tests.ranks import World
from unisono.launch import doctor_hang, rank_status
from unisono.launch.pace import FIRST, LEAST, PATIENCE, TIMES, StepPace
from unisono.launch.rank.watchdog import Watchdog
from unisono.launch.rank_status import Frame, RankStatus, from_dump, status_of
from unisono.launch.run import verdict

QUICK = (
    "recipe-own-dp2-stop:model:0:8",
    "loop-plain-dp2-break:loop:1:3",
)
TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in CASES],
)
def test_the_culprit_is_named_and_nobody_stays_or_nothing_is_wrong(case: Case, tmp_path: Path) -> None:
    played = play(case, tmp_path)
    assert not played.wrong, played.output[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    environ = {
        **os.environ,
        "HANG": "sleep:loop:1:3",
        "HANG_MARK": mark,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    flags = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *flags, str(PROGRAM), "dp=2", "600"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True) as torchrun:
        while not (tmp_path / "began").exists():
            assert torchrun.poll() is None
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGKILL)
    assert left_of(mark) == []


class Hurried(StepPace):
    """Deadlines of a second and a half, not the user's own."""

    def deadline(self) -> float:
        return 1.5


def takes_its_time(ctx, seconds):
    told = []
    store = dist.PrefixStore("hurried", ctx.store)
    watchdog = Watchdog(
        ctx.rank, ctx.world, ctx.host, store, Hurried(), lambda *words: told.append(str(words[0]))
    )
    until = time.monotonic() + (seconds if ctx.rank == 1 else 0)
    while time.monotonic() < until:
        sum(range(100))
    x = torch.ones(1)
    dist.all_reduce(x)
    watchdog.close()
    return [x.item(), told]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_rank_that_still_computes_has_more_patience(world: World) -> None:
    assert world(takes_its_time, 2, seconds=5.0) == [[2.0, []]] * 2


def test_what_is_known_of_files_is_of_files_that_are_there() -> None:
    house = Path(rank_status.__file__).parents[1]
    named = [
        *doctor_hang._LONG,
        *rank_status._LAST,
        *(file for file, *_ in rank_status._PARTS),
        *rank_status._WAITS,
    ]
    ours = [file.removeprefix("unisono/") for file in named if not file.startswith(("torch/", "fsdp/"))]
    assert [file for file in ours if not (house / file).exists()] == []


def test_the_deadline_follows_the_steps() -> None:
    now = 0.0
    pace = StepPace(clock=lambda: now)
    assert pace.deadline() == FIRST and pace.silence() == PATIENCE * FIRST
    for step in range(0, 12, 3):  # told of three at a time
        now += 0.3
        pace.stepped(step)
    assert pace.deadline() == LEAST, "short steps"
    for step in range(12, 40):
        now += 6.0
        pace.stepped(step)
    now += 1000  # a validation
    pace.stepped(40)
    assert pace.deadline() == TIMES * 6.0 and pace.step == 40
    assert StepPace(7.0).deadline() == 7.0


def waits(
    rank: int, part: str, odd: int = 0, place: str = "a.py:1 in main", state: str = "waits"
) -> RankStatus:
    return RankStatus(rank, state, "here", part, "", place, odd)


def test_who_does_not_wait_is_the_culprit_before_any_who_does() -> None:
    others = [waits(0, "x"), waits(2, "x")]
    for state in ("runs", "silent", "stopped", "gone"):
        error = verdict.hang([*others, RankStatus(1, state, "here", place="b.py:2 in f")], 30)
        assert (error.rank, error.code, error.where, error.exit) == (1, "H01", "b.py:2 in f", 6)
        assert "ranks 0, 2 wait in x" in error.what and "ranks 0, 2 at a.py:1 in main" in error.likely
        assert ("it may take so long" in error.fix) == (state in ("runs", "silent")), "more time is no remedy"


def test_of_two_that_run_the_one_that_stands_still_is_named_first() -> None:
    moving, still = RankStatus(0, "runs", idle=0.0), RankStatus(1, "runs", idle=30.0)
    assert verdict.hang([moving, still, waits(2, "x")], 30).rank == 1


def test_in_a_mismatch_the_fewer_are_odd_then_the_unusual_then_not_rank_0() -> None:
    assert verdict.hang([waits(0, "x"), waits(1, "x"), waits(2, "y")], 30).rank == 2
    assert verdict.hang([waits(0, "job.save", 2), waits(1, "gradients")], 30).rank == 0
    assert verdict.hang([waits(0, "x"), waits(1, "y")], 30).rank == 1
    error = verdict.hang([waits(0, "end", 3, state="ended"), waits(1, "x"), waits(2, "x")], 30)
    assert (error.rank, error.code, error.exit) == (0, "H02", 6) and "left the loop early" in error.what


def test_a_stand_is_read_from_the_lines_of_a_thread() -> None:
    user = Frame("/home/me/own.py", 7, "main")
    assert status_of(0, [Frame(TORCH, 1, "barrier"), user]).state == "waits"
    assert status_of(0, [Frame(TORCH, 1, "barrier"), user]).doing() == "barrier"
    beginning = [
        Frame(TORCH, 1, "_new_process_group_helper"),
        Frame("/x/site-packages/unisono/library/enter.py", 9, "init"),
    ]
    assert status_of(0, [*beginning, user]).part == "the meeting of ranks"
    asleep = status_of(0, [user, Frame(TORCH, 1, "hook")])
    assert (asleep.state, asleep.place) == ("runs", "/home/me/own.py:7 in main")


def test_a_dump_of_several_threads_is_that_of_the_main_one() -> None:
    dump = [
        "Thread 0x00000000000000ff (most recent call first):",
        '  File "/home/me/other.py", line 3 in side',
        "",
        "Thread 0x0000000000000aaa (most recent call first):",
        '  File "/home/me/own.py", line 9 in main',
    ]
    assert from_dump(0, dump, 0xFF).place == "/home/me/other.py:3 in side"
    assert from_dump(0, dump).place == "/home/me/own.py:9 in main"
    assert from_dump(0, []).state == "silent"

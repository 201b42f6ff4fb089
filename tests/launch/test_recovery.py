"""Ranks that are lost are replaced: when, by whom, and what the run computes then."""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forked import Forked
from unisono.launch import wire
from unisono.launch.pace import StepPace
from unisono.launch.rank import channel
from unisono.launch.rank.channel import SocketChannel
from unisono.observe.metrics import read_lines
from unisono.spec.errors import PeerGone
from unisono.spec.rendezvous import RankMeeting
from unisono.train.state.checkpoint import read_full

RECIPE = """
name = "tiny"
seed = 3
[model]
kind = "gpt"
n_layer = 2
n_head = 2
d_model = 32
context = 32
[data]
source = "text:{text}"
tokenizer = "byte"
[train]
steps = 40
global_batch = 8
micro_batch = 1
eval_every = 0
[out]
report = false
"""


class Training:
    """A run of `unisono train` whose ranks a test can find."""

    def __init__(self, folder: Path, *args: str) -> None:
        text = folder / "text.txt"
        text.write_text("all parts sound as one. " * 400)
        recipe = folder / "tiny.toml"
        recipe.write_text(RECIPE.format(text=text))
        words = ["train", str(recipe), "--out.dir", str(folder / "runs"), "--json", *args]
        self.process = Forked(["-m", "unisono", *words], folder, os.environ)
        self.said: list[str] = []

    def until(self, pattern: str) -> None:
        """Read what it says up to a line with this in it."""
        for line in self.process.stderr:
            self.said.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError("".join(self.said))

    def ranks(self) -> list[int]:
        """Processes of ranks, the oldest first."""
        (supervisor,) = _children(self.process.pid)
        (helper,) = _children(supervisor)
        return _children(helper)

    def end(self) -> dict[str, object]:
        code, told = self.ended()
        assert code == 0, "".join(self.said)
        return told

    def ended(self) -> tuple[int, dict[str, object]]:
        """Its exit code and its object."""
        self.said += self.process.stderr
        out = self.process.stdout.read()
        return self.process.wait(120), json.loads(out)


def _children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def weights(summary: dict[str, object]) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in read_full(Path(str(summary["checkpoint"]))).items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("plan", "number"),
    [
        pytest.param("dp=4 sync=canonical", signal.SIGKILL, marks=pytest.mark.slow),
        ("dp=2 pp=2 sync=canonical", signal.SIGKILL),
        ("dp=2 shard=2 sync=canonical", signal.SIGSTOP),
        pytest.param("pp=2 sync=canonical", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_changes_no_bit(tmp_path: Path, plan: str, number: int):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    reference = weights(Training(whole, "--plan", plan).end())
    run = Training(broken, "--plan", plan)
    for i in range(2):
        run.until(r"step \d+/" if not i else "met again")
        ranks = run.ranks()
        os.kill(ranks[-1 - i], number)
    run.until("met again")
    summary = run.end()
    assert summary["restarts"] == 2
    assert weights(summary) == reference
    lines = read_lines(Path(str(summary["run_dir"]), "metrics.jsonl"))[0]
    assert [line["step"] for line in lines] == list(range(1, 41))
    changes = read_lines(Path(str(summary["run_dir"]), "history.jsonl"))[0]
    told = [(change["event"], change.get("epoch")) for change in changes]
    assert told == [("start", None), ("lost", 1), ("met", 1), ("lost", 2), ("met", 2), ("end", None)]


@pytest.mark.timeout(120)
def test_all_begin_anew_where_one_is_lost_before_any_trains(tmp_path: Path):
    run = Training(tmp_path, "--plan", "dp=2")
    run.until("starting")
    while len(ranks := _ranks_or_none(run)) < 2:
        assert Path(f"/proc/{run.process.pid}").exists()
    os.kill(ranks[0], signal.SIGKILL)
    summary = run.end()
    assert (summary["steps"], summary["restarts"]) == (40, 1)


def _ranks_or_none(run: Training) -> list[int]:
    try:
        return run.ranks()
    except (ValueError, OSError):
        return []


@pytest.mark.timeout(120)
def test_recover_can_be_switched_off(tmp_path: Path):
    run = Training(tmp_path, "--plan", "dp=2", "--launch.recover", "false", "--train.steps", "100000")
    run.until(r"step \d+/")
    (helper,) = _children(run.process.pid)  # there is nobody between
    os.kill(_children(helper)[1], signal.SIGKILL)
    code, told = run.ended()
    assert code == 128 + signal.SIGKILL
    assert told["rank"] == 1


def test_a_rank_that_nothing_frees_gives_its_place_to_another():
    """Its main thread waits for ever in a call that knows of no cut, as a send that Gloo has forgotten."""
    ours, theirs = socket.socketpair()
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        channel = SocketChannel(theirs, pace=StepPace(0.2))
        channel.listen(FirstMeeting(leave=lambda: None), recovers=True)
        os.write(says, b"+")
        signal.pause()
        os._exit(0)
    with ours, theirs:
        os.read(hears, 1)  # it hears from now on
        ours.sendall(wire.frame(wire.dumps({"kind": "regroup", **RankMeeting(1, 0, 1, 1, 0, 1).as_json()})))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        (note,) = map(wire.event, wire.Frames().feed(ours.recv(1 << 16)))
        assert "does not come to the next meeting" in note["text"]
        assert "in test_a_rank_that_nothing_frees" in note["text"], "where its main thread stands"


def test_who_waits_for_a_slow_supervisor_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor at a slow disk answers late; Gloo has forgotten nothing."""
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr(channel, "ran", lambda thread: "as before")
    monkeypatch.setattr(channel.time, "monotonic", lambda: float(next(clock)))
    still = channel._Stillness(StepPace(60.0))
    assert not any(still.lasts(1, is_asking=True) for _ in range(10))
    assert [still.lasts(1) for _ in range(2)] == [False, True]


class FirstMeeting:
    """A meeting of two ranks. leave(): what it does to leave. met: the epochs of all that followed, in order."""

    def __init__(self, epoch: int = 0, leave: Callable[[], object] = lambda: None) -> None:
        self.place, self.store = RankMeeting(epoch, 0, 2, 2, 0, 2), None
        self.leave, self.met = leave, list[int]()

    def is_asking(self) -> bool:
        return False

    def next(self, place: RankMeeting) -> "FirstMeeting":
        self.leave()
        following = FirstMeeting(place.epoch, self.leave)
        following.met = self.met
        self.met.append(place.epoch)
        return following


class Called:
    """A rank's channel, and what its supervisor would say; its meetings are left where a test lets them."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.begun, self.go, self.told = threading.Semaphore(0), threading.Semaphore(0), list[str]()
        self.channel = SocketChannel(theirs, pace=StepPace(60.0))
        self.first = FirstMeeting(leave=self._leave)
        self.channel.listen(self.first, recovers=True)

    def _leave(self) -> None:
        self.told.append("left")
        self.begun.release()
        self.go.acquire()

    def regroup(self, epoch: int) -> None:
        self.ours.sendall(
            wire.frame(wire.dumps({"kind": "regroup", **RankMeeting(epoch, 0, 2, 2, 0, 2).as_json()}))
        )

    def goes_to(self) -> int | None:
        """The epoch of the meeting that the main thread comes to, after it has missed another rank."""
        met = self.channel.rendezvous(PeerGone("rank 1 has gone"))
        return met.epoch if met is not None else None


def test_a_rank_called_twice_while_it_leaves_goes_to_the_later_meeting() -> None:
    called = Called()
    called.regroup(1)
    called.begun.acquire()
    called.regroup(2)  # while it still leaves for the first
    main = ThreadPoolExecutor(1).submit(called.goes_to)
    called.go.release(99)
    if main.result(20) == 1:  # where it had not heard of the later one yet
        assert called.goes_to() == 2
    assert called.first.met in ([2], [1, 2])


def test_a_rank_called_again_at_its_meeting_leaves_that_too() -> None:
    called = Called()
    called.go.release(99)
    called.regroup(1)
    assert called.goes_to() == 1
    called.told.clear()
    called.regroup(2)
    assert called.goes_to() == 2
    assert called.told and called.first.met == [1, 2]


def test_a_rank_that_no_longer_hears_of_losses_is_lost() -> None:
    """Its thread beside has failed, so that nothing would ever free the main one."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        meeting = FirstMeeting(leave=lambda: os.close(-1))
        SocketChannel(theirs, pace=StepPace(60.0)).listen(meeting, recovers=True)
        signal.pause()
        os._exit(0)
    with ours, theirs:
        ours.sendall(wire.frame(wire.dumps({"kind": "regroup", **RankMeeting(1, 0, 1, 1, 0, 1).as_json()})))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_what_nobody_takes_in_is_dropped_but_for_what_others_act_on() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, frames, heard = SocketChannel(theirs, room=1 << 12), wire.Frames(), list[dict[str, object]]()
        for number in range(20_000):
            channel.send("note", text=f"{number} {'x' * 100}")
        for epoch in range(200):
            channel.send("lost", epoch=epoch)
        dropped = channel.dropped
        ours.setblocking(False)
        while "over" not in [event["kind"] for event in heard]:
            heard += map(wire.event, frames.feed(ours.recv(1 << 20)))
            channel.send("doing", text="reads again") if channel.dropped else channel.send("over")
    assert dropped > 1000 and channel.dropped == 0  # though all the time nobody took anything in
    assert [event["epoch"] for event in heard if event["kind"] == "lost"] == [*range(200)]
    assert any("events were dropped" in str(event.get("text")) for event in heard)

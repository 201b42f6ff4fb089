"""A run on two hosts, which here are two agents' worlds on one machine: ranks compute together, a host may die, and
another may come; the bits stay."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked import Forked
from tests.launch.test_recovery import RECIPE, weights
from unisono.launch.agent import Agent
from unisono.launch.fork_server import ForkServer
from unisono.launch.host_listener import HostListener
from unisono.launch.remote_hosts import RemoteHosts, RequestedHost
from unisono.launch.run.membership import RunSpread

pytestmark = pytest.mark.timeout(240)
ROOT = str(Path(__file__).parents[2])


def compute(ctx: Any) -> dict[str, Any]:
    x = torch.ones(3) * ctx.rank
    dist.all_reduce(x)
    print("x" * 300_000, flush=True)
    return {"sum": x.tolist(), "local": [ctx.local_rank, ctx.local_world], "ends": os.environ["RANK"]}


def fails(ctx: Any) -> None:
    if ctx.rank == 2:
        raise ValueError("on the other host")
    dist.barrier()


def played(function: Any, room: tuple[int, int]) -> Any:
    """A function on ranks of this host and of an agent."""
    listener = HostListener.at("127.0.0.1")
    agent = Agent(lambda: listener.door, "b", room[1], "tests.ranks:entry")
    argument = {"module": function.__module__, "file": __file__, "function": function.__name__, "group": True,
                "kwargs": {}}  # fmt: skip
    printed: dict[int, int] = {}

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "output":
            printed[rank] = max(printed.get(rank, 0), len(event["text"]))

    with ForkServer("tests.ranks:entry", path=[ROOT]) as nursery:
        thread = threading.Thread(target=agent.run)
        thread.start()
        remote = RemoteHosts(listener, room[0], None, [RequestedHost("b", room[1])])
        outcome = nursery.run(
            argument,
            sum(room),
            on_event=hear,
            timeout=60,
            backend="gloo",
            remote=remote,
            spread=RunSpread("", sum(room)),
        )
        thread.join(20)
    assert not thread.is_alive(), "the agent leaves with the run"
    return outcome, printed


def test_ranks_of_two_hosts_compute_together() -> None:
    outcome, printed = played(compute, (1, 2))
    assert outcome.error is None, outcome.error
    values = [result["value"] for result in outcome.results]
    assert [value["sum"] for value in values] == [[3.0] * 3] * 3
    assert [value["local"] for value in values] == [[0, 1], [0, 2], [1, 2]]
    assert printed == dict.fromkeys(range(3), 300_000)


def test_an_error_on_another_host_is_told_with_its_name() -> None:
    outcome, _ = played(fails, (2, 1))
    assert outcome.exit == 1 and outcome.error.rank == 2
    assert "on the other host" in outcome.error.what


class Hosted:
    """A run of `unisono train --hosts` in a folder, whose other hosts the test starts itself."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        (folder / "text.txt").write_text("all parts sound as one. " * 400)
        (folder / "tiny.toml").write_text(RECIPE.format(text=folder / "text.txt"))
        self.environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        self.process = self.start("train", "tiny.toml", "--json", "--train.steps", "120", *words)
        self.heard: list[str] = []
        threading.Thread(target=lambda: self.heard.extend(self.process.stderr), daemon=True).start()

    def start(self, *words: str) -> Forked:
        return Forked(["-m", "unisono", *words], self.folder, self.environ)

    def host(self, name: str) -> Forked:
        """Another host joins, by the door in the run's folder."""
        doors = self.until(lambda: list(self.folder.glob("runs/*/*/door.json")))
        agent = self.start("host", str(doors[0].parent), "--ranks", "1", "--name", name)
        threading.Thread(target=lambda: self.heard.extend(agent.stderr), daemon=True).start()
        return agent

    def until(self, what: Any) -> Any:
        until = time.monotonic() + 100
        while not (found := what()):
            assert time.monotonic() < until and self.process.returncode is None, "".join(self.heard)
            time.sleep(0.02)
        return found

    def said(self, text: str, times: int = 1) -> bool:
        return sum(text in line for line in list(self.heard)) >= times

    def step(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            (path,) = self.folder.glob("runs/*/*/metrics.jsonl")
            return json.loads(path.read_text().splitlines()[-1])["step"]
        return 0

    def end(self) -> dict[str, Any]:
        out = self.process.stdout.read()
        assert self.process.wait(100) == 0, "".join(self.heard)
        told = json.loads(out)
        return told | {"checkpoint": str(self.folder / told["checkpoint"])}


def test_a_host_dies_another_comes_and_the_bits_stay(tmp_path: Path) -> None:
    plan = ("--plan", "dp=2 sync=canonical", "--launch.replan", "false")
    for name in ("alone", "hosts"):
        (tmp_path / name).mkdir()
    run = Hosted(tmp_path / "hosts", *plan, "--hosts", "localhost:1,127.0.0.1:1", "--launch.shell", "true",
                 "--launch.tls", "true")  # fmt: skip
    agent = run.host("127.0.0.1")
    run.until(lambda: run.step() >= 10)
    agent.send_signal(signal.SIGKILL)
    run.until(lambda: run.said("host 127.0.0.1 is gone") and run.said("met again"))
    at = run.step()
    run.until(lambda: run.step() > at + 4)
    another = run.host("c")
    run.until(lambda: run.said("there is room for 2 ranks") and run.said("met again", 2))
    told = run.end()
    assert another.wait(30) == 0, "it leaves with the run"
    # A send that Gloo began as the other side died may wait for ever (comm/parting.py): it costs this process as well.
    forgotten = run.said("does not come to the next meeting and is replaced") and run.said("wait")
    assert told["restarts"] == 1 + forgotten and told["ranks"] == 2, "".join(run.heard)
    assert not list(tmp_path.glob("hosts/runs/*/*/door.json")), "the door is shut"
    alone = Hosted(tmp_path / "alone", *plan).end()
    assert weights(told) == weights(alone)
    history = [
        json.loads(line)
        for line in next(tmp_path.glob("hosts/runs/*/*/history.jsonl")).read_text().splitlines()
    ]
    assert {"lost", "met"} <= {line["event"] for line in history}


def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    run = Hosted(tmp_path, "--plan", "dp=2", "--hosts", "localhost:1,127.0.0.1:1", "--launch.shell", "false")
    run.process.stdout.read()
    assert run.process.wait(60) == 2
    run_said = "".join(run.heard)
    assert "U-L10" in run_said and "127.0.0.1 did not join: its shell left with 1" in run_said
    assert not list(tmp_path.glob("runs/*/*")), "nothing ran, so nothing is left"


def test_what_only_a_lost_host_held_is_found_on_another(tmp_path: Path) -> None:
    """Each host holds a stage alone; a spare one takes the place of the lost one, and nothing was saved."""
    plan = ("--plan", "pp=2 sync=canonical", "--launch.replan", "false")
    for name in ("alone", "hosts"):
        (tmp_path / name).mkdir()
    hosts = "localhost:1,127.0.0.1:1,127.0.0.2:1"
    run = Hosted(tmp_path / "hosts", *plan, "--hosts", hosts, "--launch.shell", "true",
                 "--launch.snapshot_every", "2")  # fmt: skip
    agent = run.host("127.0.0.1")
    run.until(lambda: run.said("host 127.0.0.1 has come"))
    spare = run.host("127.0.0.2")  # who comes later is the spare one
    run.until(lambda: run.step() >= 20)
    agent.send_signal(signal.SIGKILL)
    run.until(lambda: run.said("host 127.0.0.1 is gone") and run.said("met again"))
    told = run.end()
    assert spare.wait(30) == 0
    assert not run.said("going on from"), "no checkpoint, not the beginning: " + "".join(run.heard)
    alone = Hosted(tmp_path / "alone", *plan).end()
    assert weights(told) == weights(alone)

"""Whole runs that meet through a folder: one is killed, comes back, and is stopped; nothing of it stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from unisono_contrib.comm.depot import depot_at
from unisono_contrib.comm.mailbox.letters import SEAL, read, unsealed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MARK = "MARK_OF_A_TEST"


class Run:
    """A run in processes of its own, which bear a mark."""

    def __init__(self, folder: Path, peer: str, *more: str) -> None:
        self.mark, self.folder, self.peer = uuid4().hex, folder / peer, peer
        words = [
            "train", "--demo", "--plan", "sync=diloco:h=5,outer_momentum=0.5", "--train.steps", "100000",
            "--train.global_batch", "4", "--train.save_every", "5", "--launch.mailbox", f"file://{folder}/box",
            "--launch.peer", peer, "--launch.peer_timeout", "4", "--launch.threads_per_rank", "1",
            "--no-launch.recover", "--no-out.report", "--out.dir", str(self.folder), *more,
        ]  # fmt: skip
        self.log = (folder / f"{peer}-{self.mark}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono", *words],
            stdout=self.log, stderr=self.log, env={**os.environ, MARK: self.mark}, start_new_session=True,
        )  # fmt: skip

    def pids(self) -> list[int]:
        return [
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._ours(entry)
        ]

    def _ours(self, entry: Path) -> bool:
        try:
            return f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False

    def lines(self) -> list[dict]:
        files = sorted(self.folder.glob("demo/*/metrics.jsonl"))
        return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []

    def rounds(self) -> list[tuple[int, int]]:
        return [(line["round"], line["cohort"]) for line in self.lines() if "round" in line]

    def run_dir(self) -> Path:
        return next(path.parent for path in self.folder.glob("demo/*/metrics.jsonl"))

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def started(peer: str, *more: str) -> Run:
        runs.append(Run(tmp_path, peer, *more))
        return runs[-1]

    yield started
    for run in runs:
        run.kill()
        run.log.close()


def until(true: Callable[[], bool], run: Run) -> None:
    while not true():
        assert run.process.poll() is None, Path(run.log.name).read_text()[-2000:]
        time.sleep(0.1)


def test_a_run_is_killed_and_comes_back_and_another_is_stopped(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    a, b = start("a"), start("b")
    until(lambda: (3, 2) in b.rounds(), b)
    a.kill()
    until(lambda: b.rounds()[-1][1] == 1, b)  # it is waited for as long as it may live
    again = start("a", "--resume", str(a.run_dir()))
    until(lambda: len(again.rounds()) > 3 and again.rounds()[-1][1] == 2, again)
    assert a.peer == again.peer
    again.process.send_signal(signal.SIGINT)
    assert again.process.wait(60) == 130
    assert not again.pids()
    depot = depot_at(f"file://{tmp_path}/box", "test")
    until(lambda: b.rounds()[-1][1] == 1, b)
    assert "a.json" not in depot.names("peers")
    b.process.send_signal(signal.SIGINT)
    assert b.process.wait(60) == 130
    assert not b.pids() and depot.names("peers") == []
    for room in ("rounds", "outer"):
        for folder in depot.names(room):
            names = depot.names(f"{room}/{folder}")
            assert not [name for name in names if name.endswith(".part")]
            for name in (name.removesuffix(SEAL) for name in names if name.endswith(SEAL)):
                assert read(depot, f"{room}/{folder}", name) is not None
    assert unsealed(depot, "places/00000000.json") == {"peers": ["a", "b"]}

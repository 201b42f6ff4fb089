"""The supervisor answers for its ranks who asks in the run folder, also for those that do not see the folder."""

import select
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from unisono.launch import inspect, inspect_folder
from unisono.launch.inspect_server import InspectServer
from unisono.launch.rank_status import RankStatus

pytestmark = pytest.mark.timeout(60)


@dataclass
class Worker:
    """A rank that keeps what it is told."""

    number: int
    told: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})


def appear(server: InspectServer, folder: Path, workers: dict[int, Worker], homes: list[list[Any]]) -> None:
    """All ranks say who they are."""
    for (rank, worker), home in zip(workers.items(), homes, strict=True):
        me = replace(inspect_folder.this_process(rank, 9, "here", -1, "secret"), home=home)
        event = {"kind": "appear", "folder": str(folder), "living": asdict(me)}
        assert server.heard(worker, event, workers), "it is for nobody else"
    until = time.monotonic() + 20
    while shown(folder) != [(rank, len(workers)) for rank in workers] and time.monotonic() < until:
        time.sleep(0.01)


def report(worker: Worker, of: int, **facts: Any) -> dict[str, Any]:
    status = asdict(RankStatus(of, "runs", "there", idle=0.1, step=7))
    return {"kind": "report", "token": worker.told[-1]["token"], "status": status, **facts}


def shown(folder: Path) -> list[tuple[int, int]]:
    """Rank and world of each rank in the folder."""
    return [(living.rank, living.world) for living in inspect_folder.living(folder)]


def turn(server: InspectServer, workers: dict[int, Worker]) -> None:
    """The supervisor's loop, up to the next thing that the server has to do."""
    assert select.select([server], [], [], 20)[0]
    server.turn(workers)


def test_each_rank_is_asked_and_its_report_reaches_who_asks(tmp_path: Path) -> None:
    server, workers, folder = InspectServer(), {0: Worker(5), 1: Worker(6)}, tmp_path / "alive"
    appear(server, folder, workers, [inspect_folder.home(), ["elsewhere"]])
    ranks = inspect_folder.living(folder)
    assert shown(folder) == [(0, 2), (1, 2)]
    with ThreadPoolExecutor(1) as asker:
        seen = asker.submit(inspect.look, folder, ranks)
        turn(server, workers)
        for rank, worker in workers.items():
            assert server.heard(worker, report(worker, rank, calls={}), workers)
        assert [(one.spoke, one.status.step) for one in seen.result()] == [(True, 7), (True, 7)]
    server.close()
    assert not folder.exists()


def test_a_rank_that_does_not_answer_is_looked_at_by_its_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_folder, "SLOW", 0.3)
    server, workers, folder = InspectServer(), {0: Worker(5), 1: Worker(6)}, tmp_path / "alive"
    appear(server, folder, workers, [["elsewhere"], ["elsewhere"]])
    with ThreadPoolExecutor(1) as asker:
        seen = asker.submit(inspect.look, folder, inspect_folder.living(folder))
        turn(server, workers)
        server.heard(workers[0], report(workers[0], 0, calls={}), workers)
        turn(server, workers)
        assert workers[0].told[-1]["about"]["rank"] == 1 and len(workers[1].told) == 1
        server.heard(workers[0], report(workers[0], 1, rank=1), workers)
        assert [one.spoke for one in seen.result()] == [True, False]
    server.close()


def test_the_folder_follows_the_members_of_a_run(tmp_path: Path) -> None:
    server, folder = InspectServer(), tmp_path / "alive"
    workers = {rank: Worker(rank) for rank in range(3)}
    appear(server, folder, workers, [inspect_folder.home()] * 3)
    left = {0: workers[0], 1: workers[2]}
    assert not server.heard(left[0], {"kind": "ready", "step": 4}, left), "others hear it too"
    until = time.monotonic() + 20
    while shown(folder) != [(0, 2), (1, 2)] and time.monotonic() < until:
        time.sleep(0.01)
    assert shown(folder) == [(0, 2), (1, 2)]
    server.close()
    assert not folder.exists()


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    server = InspectServer()
    assert not server.heard(Worker(0), {"kind": "ready", "step": 1}, {})
    server.close()
    assert list(tmp_path.iterdir()) == []

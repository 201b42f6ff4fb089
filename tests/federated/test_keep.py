"""What real clients keep: a client that is killed, or too late, and joins again goes on as if it had dropped out of
that task alone, to the last bit."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.federated.federations import federated, recipe_of
from tests.federated.places import Place, serving
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, ClientHost, SimulatedClients
from unisono_contrib.federated.keep import ClientKeeper
from unisono_contrib.federated.server import RunParts, client_host

pytestmark = pytest.mark.timeout(60)
KEEPING = {
    "federated__clients": 3, "federated__participation": 1, "federated__dropout": 0, "federated__rounds": 4,
    "federated__strategy": "scaffold", "federated__codec": "topk:ratio=0.2+ef",
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


class Missing(SimulatedClients):
    """Client 2 drops out of round 2 before it trains. forgets: what it keeps, then."""

    def __init__(self, host: ClientHost, forgets: bool) -> None:
        super().__init__(host)
        self._forgets = forgets

    def start(self, task: Task) -> None:
        if (task.client, task.number) != (2, 1):
            super().start(task)
        elif self._forgets:
            del self._host.kept[2]

    def finish(self, task: Task) -> Answer | None:
        return None if (task.client, task.number) == (2, 1) else super().finish(task)


def simulated(corpus: Corpus, forgets: bool) -> Tensor:
    resolved = recipe_of(**KEEPING)

    def clients_of(parts: RunParts) -> SimulatedClients:
        return Missing(client_host(resolved, parts), forgets)

    federation = federated(corpus, clients_of, **KEEPING)
    for _ in range(4):
        federation.play_round()
    return federation.weights


def played(place: Place) -> None:
    """Rounds 2 to 4, before the third of which oslo joins again."""
    assert [place.federation.play_round()["clients"] for _ in range(2)] == [3, 2]
    place.join("oslo", "2", state=place.state)  # type: ignore[attr-defined]
    place.hear_until(lambda: 2 in place.clients._members)
    assert [place.federation.play_round()["clients"] for _ in range(2)] == [3, 3]


@pytest.mark.parametrize("trained", [False, True], ids=["before it has trained", "before it answers"])
@pytest.mark.parametrize("keeps", [True, False], ids=["with a folder", "without"])
def test_a_client_that_is_killed_and_joins_again_goes_on(
    corpus: Corpus, tmp_path: Path, trained: bool, keeps: bool
) -> None:
    def dies(host: ClientHost, task: Task) -> Answer:
        if task.number == 1:
            if trained:
                host.play(task)
            raise KeyboardInterrupt
        return host.play(task)

    with serving(corpus, **KEEPING) as place:
        place.state = tmp_path / "state" if keeps else None  # type: ignore[attr-defined]
        place.join("milan", "0-1")
        place.join("oslo", "2", play=dies, state=place.state)  # type: ignore[attr-defined]
        place.clients.wait_for(3, 30.0)
        played(place)
    assert torch.equal(place.federation.weights, simulated(corpus, forgets=not keeps))
    anew = [note for note in place.notes if "it begins anew" in note]
    assert len(anew) == (0 if keeps else 1)
    assert all("client 2 has not kept what follows its task 1" in note for note in anew)


def test_a_client_that_is_too_late_goes_on_from_what_the_server_has(corpus: Corpus) -> None:
    """Its late answer is not counted, so neither is what it has learnt by it: no folder is needed for that."""
    waiting = threading.Event()

    def late(host: ClientHost, task: Task) -> Answer:
        answer = host.play(task)
        if task.number == 1:
            waiting.wait(30)
        return answer

    with serving(corpus, **KEEPING) as place:
        place.join("milan", "0-1")
        place.join("oslo", "2", play=late)
        place.clients.wait_for(3, 30.0)
        place.federation.play_round()
        place.clients._patience = 0.5
        assert place.federation.play_round()["clients"] == 2
        waiting.set()
        place.clients._patience = 30.0
        place.hear_until(lambda: not place.clients._members[2].silent)
        assert [place.federation.play_round()["clients"] for _ in range(2)] == [3, 3]
    assert torch.equal(place.federation.weights, simulated(corpus, forgets=False))


def test_a_server_that_goes_on_from_a_checkpoint_has_its_clients_go_back(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Which are at later rounds, in their folders."""
    whole = federated(corpus, **KEEPING)
    for _ in range(4):
        whole.play_round()
    with serving(corpus, **KEEPING) as place:
        place.join("milan", "0-2", state=tmp_path / "state")
        place.clients.wait_for(3, 30.0)
        place.federation.play_round()
        folder = place.federation.save(tmp_path)
        for _ in range(2):
            place.federation.play_round()
    with serving(corpus, **KEEPING) as place:
        place.join("milan", "0-2", state=tmp_path / "state")
        place.clients.wait_for(3, 30.0)
        place.federation.restore(folder)
        for _ in range(3):
            place.federation.play_round()
    assert torch.equal(place.federation.weights, whole.weights)
    assert not any("anew" in note for note in place.notes)


def task(number: int, heard: int, run: str = "a/1") -> Task:
    return Task(number, 3, torch.zeros(1), 0.1, run=run, heard=heard)


def test_versions_are_of_a_run_and_the_last_ones_stay(tmp_path: Path) -> None:
    notes: list[str] = []
    keeper = ClientKeeper(tmp_path, notes.append)
    for number in range(12):
        keeper.after(task(number, number - 1), {"x": torch.tensor([float(number)])})
    files = [path.stem for path in sorted(tmp_path.rglob("*.safetensors"))]
    assert files == [f"{number:08d}" for number in range(4, 12)]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    again = ClientKeeper(tmp_path, notes.append)
    assert again.before(task(12, -1)) is None and again.before(task(12, 3, "another/1")) is None
    kept: Any = again.before(task(12, 7))
    assert float(kept["x"]) == 7.0 and len(notes) == 1
    kept["x"].zero_()
    assert float(again.before(task(12, 7))["x"]) == 7.0  # type: ignore[index]
    again.after(task(8, 7), {"x": torch.tensor([80.0])})
    assert again.before(task(12, 11)) is None  # of a way that was left
    assert len(notes) == 2


def test_a_version_that_a_disk_has_damaged_is_none(tmp_path: Path) -> None:
    notes: list[str] = []
    ClientKeeper(tmp_path, notes.append).after(task(0, -1), {"x": torch.ones(3)})
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-2])
    keeper = ClientKeeper(tmp_path, notes.append)
    assert keeper.before(task(1, 0)) is None and keeper.before(task(2, 0)) is None
    assert len(notes) == 1

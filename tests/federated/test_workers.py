"""Simulated clients in several processes: the bits of one process, and no process left behind."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.federated.federations import federated, recipe_of, weights_after
from unisono.spec.errors import PeerGone, UserCodeError
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.server import Federation, RunParts, client_host
from unisono_contrib.federated.workers import WorkerClients

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


def by_two(corpus: Corpus, **keys: object) -> Federation:
    resolved = recipe_of(**keys)

    def clients_of(parts: RunParts) -> WorkerClients:
        return WorkerClients(client_host(resolved, parts), 2)

    return federated(corpus, clients_of, **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"federated__strategy": "scaffold", "federated__codec": "topk:ratio=0.2+ef"},
        {"federated__strategy": "fedbuff:3"},
        {"train__optimizer": "adamw", "privacy__noise": 0.1, "privacy__clip": 0.05},
        {"federated__secure": "true", "privacy__noise": 0.1, "privacy__clip": 0.05},
    ],
    ids=str,
)
def test_two_processes_have_the_bits_of_one(corpus: Corpus, keys: dict, tmp_path: Path) -> None:
    """Also when they go on from a checkpoint."""
    federation = by_two(corpus, **keys)
    for _ in range(2):
        federation.play_round()
    folder = federation.save(tmp_path)
    federation.clients.close()
    again = by_two(corpus, **keys)
    again.restore(folder)
    for _ in range(2):
        again.play_round()
    again.clients.close()
    assert torch.equal(again.weights, weights_after(4, corpus, **keys))
    workers = [*federation.clients._workers, *again.clients._workers]  # type: ignore[attr-defined]
    assert [worker.process.exitcode for worker in workers] == [0] * 4


def test_numbers_that_go_bad_name_the_client(corpus: Corpus) -> None:
    federation = by_two(corpus, train__lr=1e200)
    with pytest.raises(UserCodeError, match=r"client \d+: ") as caught:
        for _ in range(3):
            federation.play_round()
    federation.clients.close()
    assert "local step" in caught.value.where and "train.lr" in caught.value.fix


def test_a_process_that_is_killed_ends_the_run(corpus: Corpus) -> None:
    federation = by_two(corpus)
    federation.play_round()
    workers = federation.clients._workers  # type: ignore[attr-defined]
    os.kill(workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(PeerGone, match="exit code -9"):
        for _ in range(4):
            federation.play_round()
    federation.clients.close()
    assert not any(worker.process.is_alive() for worker in workers)

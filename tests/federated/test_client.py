"""Local steps: which samples, from which weights, with which optimiser."""

import numpy as np
import pytest
import torch

from tests.federated.federations import recipe_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.client import LocalTrainer, Task
from unisono_contrib.spec.federated import STRATEGIES

SAMPLES = np.arange(100, 137, dtype=np.int64)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


def trainer_of(corpus: Corpus, strategy: str = "fedavg", **keys: object) -> LocalTrainer:
    resolved = recipe_of(**keys)
    return LocalTrainer(resolved.recipe, resolved.plan, corpus, STRATEGIES.read(strategy))


def batches(trainer: LocalTrainer, number: int, share: float = 1.0) -> list[list[int]]:
    """Samples of each local step of client 3."""
    task = Task(number, 3, trainer.weights(), 0.1, share)
    chosen = list(trainer._batches(task, SAMPLES))
    leaves = [trainer._leaf(3, rows, each) for each, rows in chosen]
    inputs = trainer.corpus.train.fetch(SAMPLES)[0]
    return [
        [int(SAMPLES[int((inputs == x).flatten(1).all(1).nonzero()[0])]) for x in leaf.inputs]
        for leaf in leaves
    ]


def test_a_pass_has_each_sample_once_and_the_next_one_in_another_order(corpus: Corpus) -> None:
    trainer = trainer_of(corpus, federated__local_steps=0, federated__local_epochs=2)
    steps = batches(trainer, 0)
    assert [len(step) for step in steps] == [16, 16, 5] * 2
    first, second = ([n for step in steps[at : at + 3] for n in step] for at in (0, 3))
    assert sorted(first) == sorted(second) == SAMPLES.tolist() and first != second
    assert [n for step in batches(trainer, 1)[:3] for n in step] not in (first, second)


def test_local_steps_and_stragglers(corpus: Corpus) -> None:
    trainer = trainer_of(corpus, federated__local_steps=7)
    assert len(batches(trainer, 0)) == 7
    assert len(batches(trainer, 0, share=0.5)) == 4
    assert len(batches(trainer, 0, share=0.0)) == 1


def test_positions_are_never_the_same_so_that_dropout_is_drawn_anew(corpus: Corpus) -> None:
    trainer = trainer_of(corpus)
    seen: list[int] = []
    for client in (0, 1):
        for number in range(3):
            task = Task(number, client, trainer.weights(), 0.1)
            for chosen, rows in trainer._batches(task, SAMPLES):
                seen += trainer._leaf(client, rows, chosen).samples.tolist()
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_clients_know_nothing_of_each_other(corpus: Corpus, optimizer: str) -> None:
    """The same task gives the same delta, whoever was here before: moments begin anew."""
    momentum = {"train__momentum": 0.9} if optimizer == "sgd" else {}
    trainer = trainer_of(corpus, "fedavg", train__optimizer=optimizer, **momentum)
    start = trainer.weights()
    task = Task(0, 3, start, 0.05)
    first = trainer.train(task, SAMPLES, {}).delta
    trainer.train(Task(0, 4, start, 0.05), SAMPLES + 50, {})
    assert torch.equal(trainer.train(task, SAMPLES, {}).delta, first)


def test_a_step_of_fedprox_is_a_gradient_step_on_its_loss(corpus: Corpus) -> None:
    """Two full-batch steps of SGD: the second one is pulled back by lr · mu · (what the first has moved)."""
    keys = {"train__global_batch": 64, "federated__local_steps": 2}
    plain, pulled = (trainer_of(corpus, text, **keys) for text in ("fedavg", "fedprox:0.5"))
    start = plain.weights()
    task, once = Task(0, 3, start, 0.1), Task(0, 3, start, 0.1, share=0.5)
    moved = plain.train(once, SAMPLES, {}).delta
    wanted = plain.train(task, SAMPLES, {}).delta - 0.1 * 0.5 * moved
    assert torch.allclose(pulled.train(task, SAMPLES, {}).delta, wanted, rtol=1e-10, atol=1e-14)

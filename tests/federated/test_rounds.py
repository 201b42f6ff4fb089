"""Rounds of simulated clients: what they are equal to, and that they go on from a checkpoint to the last bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.federated.federations import federated, recipe_of, weights_after
from unisono.spec.errors import UsageError, UserCodeError
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.state.checkpoint import read_full
from unisono_contrib.federated.clients import ClientHost, SimulatedClients
from unisono_contrib.federated.cohorts import RoundDraws
from unisono_contrib.federated.server import RunParts
from unisono_contrib.spec.federated import STRATEGIES

EVERYBODY = {"federated__participation": 1, "federated__dropout": 0, "federated__clients": 5}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("split", ["iid", "dirichlet:alpha=0.3", "shards:2"])
def test_all_clients_with_a_full_batch_are_a_gradient_step(corpus: Corpus, split: str) -> None:
    """FedAvg, one local step on all of a client's samples, by SGD: the step of the whole data (anchor a2)."""
    whole = weights_after(
        2, corpus, **EVERYBODY | {"federated__clients": 1}, train__global_batch=2000, federated__local_steps=1
    )
    parts = weights_after(
        2, corpus, **EVERYBODY, federated__split=split, train__global_batch=2000, federated__local_steps=1
    )
    assert off(parts, whole) < 1e-12
    equal = weights_after(
        2, corpus, **EVERYBODY, federated__split="dirichlet:alpha=0.3", train__global_batch=2000,
        federated__local_steps=1, federated__weights="equal",
    )  # fmt: skip
    assert off(equal, whole) > 1e-6


@pytest.mark.parametrize(
    "strategy",
    ["fedprox:mu=0", "fedavgm:beta=0", "scaffold:frozen=true", "outer_nesterov:outer_lr=1,outer_momentum=0"],
)
def test_strategies_without_what_they_add_are_fedavg(corpus: Corpus, strategy: str) -> None:
    plain = weights_after(3, corpus)
    assert torch.equal(weights_after(3, corpus, federated__strategy=strategy), plain)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fedprox_without_mu_is_fedavg_under_any_optimiser(corpus: Corpus, optimizer: str) -> None:
    keys = {"train__optimizer": optimizer, "train__clip": 1.0, "train__lr": 0.01}
    if optimizer == "sgd":
        keys["train__momentum"] = 0.9
    plain = weights_after(2, corpus, **keys)
    assert torch.equal(weights_after(2, corpus, federated__strategy="fedprox:0", **keys), plain)


def test_a_buffer_of_the_only_client_is_a_round(corpus: Corpus) -> None:
    """Asynchronous training with one worker is sequential (anchor a2)."""
    alone = EVERYBODY | {"federated__clients": 1}
    whole = weights_after(3, corpus, **alone)
    assert torch.equal(weights_after(3, corpus, **alone, federated__strategy="fedbuff:1"), whole)


def test_asynchronous_clients_fall_behind_and_their_deltas_count_for_less(corpus: Corpus) -> None:
    keys = {"federated__strategy": "fedbuff:2", "federated__participation": 0.5}
    federation = federated(corpus, **keys)
    behind = [federation.play_round()["behind"] for _ in range(4)]
    assert behind[0] == 0 < max(behind)
    flat = weights_after(4, corpus, **keys | {"federated__strategy": "fedbuff:2,power=0"})
    assert off(flat, federation.weights) > 1e-6


@pytest.mark.parametrize(
    "strategy",
    [
        "fedprox:mu=1",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "scaffold",
        "fedbuff:2",
        "outer_nesterov",
    ],
)
def test_strategies_with_what_they_add_are_not(corpus: Corpus, strategy: str) -> None:
    assert off(weights_after(3, corpus, federated__strategy=strategy), weights_after(3, corpus)) > 1e-6


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"federated__strategy": "fedavgm"},
        {"federated__strategy": "fedadam"},
        {"federated__strategy": "scaffold"},
        {"federated__strategy": "fedbuff:3"},
        {"federated__codec": "topk:ratio=0.1+ef"},
        {"federated__codec": "powersgd:r=2+ef"},
        {"federated__strategy": "fedbuff:2", "federated__codec": "topk:ratio=0.1+ef"},
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(corpus: Corpus, keys: dict, tmp_path: Path) -> None:
    whole = federated(corpus, **keys)
    lines = [whole.play_round() for _ in range(4)]
    first = federated(corpus, **keys)
    for _ in range(2):
        first.play_round()
    folder = first.save(tmp_path)
    again = federated(corpus, **keys)
    again.restore(folder)
    later = [again.play_round() for _ in range(2)]
    assert torch.equal(again.weights, whole.weights)
    assert [line["loss"] for line in later] == [line["loss"] for line in lines[2:]]
    assert again.save(tmp_path).name == "step-000004"
    kept = read_full(tmp_path / "checkpoints/step-000004")
    assert not whole.kept or any(name.startswith("federated/server/") for name in kept)
    # A checkpoint does not disturb the run that writes it.
    for _ in range(2):
        first.play_round()
    assert torch.equal(first.weights, whole.weights)


def test_the_seed_alone_decides(corpus: Corpus) -> None:
    assert torch.equal(weights_after(2, corpus), weights_after(2, corpus))
    assert not torch.equal(weights_after(2, corpus), weights_after(2, corpus, seed=1))


def test_participation_dropout_and_stragglers_are_as_often_as_they_say() -> None:
    config = recipe_of(federated__clients=50, federated__participation=0.1, federated__stragglers=0.3)
    drawn = RoundDraws(7, config.recipe.federated, range(50))
    cohorts = [drawn.cohort(number) for number in range(400)]
    assert all(len(set(cohort)) == 5 for cohort in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=50)
    assert counts.min() > 15 and counts.max() < 70  # 40 expected
    tasks = [(n, client) for n, cohort in enumerate(cohorts) for client in cohort]
    assert np.mean([drawn.drops(*task) for task in tasks]) == pytest.approx(0.2, abs=0.04)  # 4 deviations
    shares = [drawn.share(*task) for task in tasks]
    assert np.mean([share < 1.0 for share in shares]) == pytest.approx(0.3, abs=0.04)


def test_a_round_of_which_nobody_answers_changes_nothing(corpus: Corpus) -> None:
    federation = federated(corpus, federated__dropout=0.999, federated__strategy="fedavgm")
    before, line = federation.weights.clone(), federation.play_round()
    assert torch.equal(federation.weights, before) and line["clients"] == 0 and line["dropped"] == 4
    assert line["loss"] is None


def test_a_straggler_drops_out_or_brings_what_it_has_done(corpus: Corpus) -> None:
    late = {"federated__stragglers": 0.999, "federated__dropout": 0, "federated__local_steps": 20}
    dropped = federated(corpus, **late, federated__rounds=1).play_round()
    partial = federated(corpus, **late, federated__rounds=1, federated__late="partial").play_round()
    assert (dropped["clients"], dropped["late"], partial["clients"]) == (0, 4, 4)
    assert 4 <= partial["local_steps"] < 80


def test_numbers_that_go_bad_name_the_client(corpus: Corpus) -> None:
    with pytest.raises(UserCodeError, match=r"client \d+: "):
        weights_after(3, corpus, train__lr=1e200)


def test_a_split_by_class_needs_classes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 200)
    keys = {"model__kind": "mlp"}
    with pytest.raises(UsageError):
        federated(None, **keys, data__source=f"text:{text}")


def test_a_poisoned_tenth_moves_a_robust_aggregate_little_and_the_mean_far(corpus: Corpus) -> None:
    """Of 10 clients one sends its delta times -10. Distances are those of the weights after two rounds."""

    def attack(parts: RunParts) -> SimulatedClients:
        host = ClientHost(parts.trainer, parts.samples, parts.codec)
        return SimulatedClients(
            host, lambda a: replace(a, parts=[-10.0 * x for x in a.parts]) if a.client == 7 else a
        )

    def moved(aggregate: str) -> float:
        keys = {
            "federated__participation": 1, "federated__dropout": 0, "federated__split": "iid",
            "federated__clients": 10, "federated__local_steps": 3, "federated__aggregate": aggregate,
        }  # fmt: skip
        start, clean, poisoned = (federated(corpus, clients, **keys) for clients in (None, None, attack))
        for _ in range(2):
            clean.play_round()
            poisoned.play_round()
        way = clean.weights - start.weights
        return float((poisoned.weights - clean.weights).norm() / way.norm())

    assert moved("mean") > 1.0
    for aggregate in ("median", "trimmed_mean:0.1", "multi_krum:1", "bulyan:1"):
        assert moved(aggregate) < 0.35, aggregate


def test_every_strategy_is_tried_here() -> None:
    assert {*STRATEGIES.names()} == {
        "outer_nesterov", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbuff", "fedprox", "fedyogi", "scaffold"
    }  # fmt: skip

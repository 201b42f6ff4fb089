"""What would be the same in the next round ends what it is a fault of; a drop-out does not."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.federated.federations import federated, recipe_of
from tests.federated.places import serving
from unisono.spec.errors import HangError, UnisonoError, UsageError, UserCodeError
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, ClientHost, SimulatedClients
from unisono_contrib.federated.server import RunParts
from unisono_contrib.spec.federated import Aggregate

pytestmark = pytest.mark.timeout(60)
EVERYBODY = {"federated__participation": 1, "federated__dropout": 0, "federated__clients": 5}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


def cut(answer: Answer) -> Answer:
    return replace(answer, parts=[part[:-1] for part in answer.parts])


@pytest.mark.parametrize(
    "error,ends_with",
    [
        (ValueError("no such column"), UserCodeError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), UserCodeError),
        (KeyError("label"), UserCodeError),
        (UsageError("no such folder", code="C03"), UsageError),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_a_client_whose_steps_raise_ends_and_the_others_go_on(
    corpus: Corpus, error: Exception, ends_with: type
) -> None:
    def raises(host: ClientHost, task: Task) -> Answer:
        raise error

    with serving(corpus, **EVERYBODY) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=raises)
        place.clients.wait_for(5, 30.0)
        lines = [place.federation.play_round() for _ in range(2)]
    ended = place.outcomes["oslo"]
    assert isinstance(ended, ends_with) and str(error.args[0]) in ended.what
    assert [(line["clients"], line["dropped"]) for line in lines] == [(4, 1)] * 2
    assert sum("oslo has left" in note for note in place.notes) == 1
    assert sum("oslo has joined" in note for note in place.notes) == 1  # it does not come again with the same


@pytest.mark.parametrize(
    "wrong,why",
    [
        (cut, "is no delta of this run"),
        (lambda answer: replace(answer, parts=[]), "is no delta of this run"),
        (
            lambda answer: replace(answer, growth={"control": answer.parts[0].clone()}),
            "vectors of this model",
        ),
        (lambda answer: replace(answer, samples=0), "no samples"),
    ],
    ids=["another model", "no delta", "another strategy", "no message"],
)
def test_a_client_that_sends_what_no_client_of_the_run_does_is_refused(
    corpus: Corpus, wrong: Any, why: str
) -> None:
    with serving(corpus, **EVERYBODY) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=lambda host, task: wrong(host.play(task)))
        place.clients.wait_for(5, 30.0)
        lines = [place.federation.play_round() for _ in range(2)]
        place.hear_until(lambda: "oslo" in place.outcomes)
    ended = place.outcomes["oslo"]
    assert isinstance(ended, UsageError) and ended.code == "L11" and why in ended.what
    assert [(line["clients"], line["dropped"]) for line in lines] == [(4, 1)] * 2


def test_a_simulated_client_that_does_so_ends_the_run(corpus: Corpus) -> None:
    def clients_of(parts: RunParts) -> SimulatedClients:
        host = ClientHost(parts.trainer, parts.samples, parts.codec)
        return SimulatedClients(host, lambda a: cut(a) if a.client == 3 else a)

    with pytest.raises(UserCodeError, match="client 3: its answer is no delta of this run"):
        federated(corpus, clients_of, **EVERYBODY).play_round()


class Choosy(Aggregate):
    """Refuses all but the zeros of the trial before the first round."""

    name = "choosy"

    def combine(self, deltas: Tensor, weights: Tensor) -> Tensor:
        if bool(deltas.any()):
            raise UsageError("not these deltas", code="C06")
        return deltas[0]


def test_an_aggregate_that_refuses_enough_clients_ends_the_run(corpus: Corpus) -> None:
    federation = federated(corpus, **EVERYBODY)
    federation.combiner = replace(federation.combiner, aggregate=Choosy())
    with pytest.raises(UsageError, match="not these deltas"):
        federation.play_round()


def test_an_aggregate_that_has_too_few_skips_the_round(corpus: Corpus) -> None:
    keys = EVERYBODY | {"federated__aggregate": "krum:attackers=1", "federated__dropout": 0.5}
    federation = federated(corpus, **keys, federated__rounds=40)
    skipped = [line["skipped"] for line in federation.rounds() if "skipped" in line]
    assert len(skipped) > 10 and federation.number == 40  # drawn by the seed: no fault, however often
    assert any("needs" in why for why in skipped)


def test_a_secure_run_without_its_library_does_not_begin(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match="cryptography is not installed") as caught:
        federated(corpus, **EVERYBODY, federated__secure="true")
    assert caught.value.code == "E01"


def ended_after(federation: Any) -> tuple[int, UnisonoError]:
    """(rounds made, what ended the run)."""
    with pytest.raises(UnisonoError) as caught:
        for _ in range(100):
            federation.play_round()
    return federation.number, caught.value


def test_ten_rounds_that_are_lost_in_a_row_end_the_run(corpus: Corpus) -> None:
    pytest.importorskip("cryptography", reason="the extra `federated` is not installed")
    keys = EVERYBODY | {"federated__secure": "true", "federated__rounds": 50}
    number, error = ended_after(federated(corpus, **keys, federated__secure_limit=1e-6))
    assert isinstance(error, UsageError) and (number, error.code) == (9, "A01")
    assert "10 rounds in a row are lost" in error.what and "beyond the limit" in error.what
    assert error.where == "rounds 1 to 10" and "a larger limit" in error.fix


def test_lost_rounds_are_counted_from_the_last_step(corpus: Corpus) -> None:
    bad: list[int] = []

    def clients_of(parts: RunParts) -> SimulatedClients:
        host = ClientHost(parts.trainer, parts.samples, parts.codec)
        nan = lambda answer: replace(answer, parts=[part * torch.nan for part in answer.parts])
        return SimulatedClients(host, lambda a: nan(a) if a.number in bad else a)

    federation = federated(corpus, clients_of, **EVERYBODY, federated__rounds=50)
    bad += [*range(1, 9), *range(10, 100)]
    number, error = ended_after(federation)
    assert isinstance(error, HangError) and number == 19
    assert "no client has answered with numbers" in error.what


def test_a_server_whose_clients_have_all_gone_waits_for_one_and_no_longer(corpus: Corpus) -> None:
    def dies(host: ClientHost, task: Task) -> Answer:
        raise KeyboardInterrupt

    with serving(corpus, patience=0.2, **EVERYBODY) as place:
        place.join("milan", "0-4", play=dies)
        place.clients.wait_for(5, 30.0)
        with pytest.raises(HangError, match="0 of 1 clients have joined"):
            for _ in range(2):  # in the first round, if it has gone before all tasks are sent
                assert place.federation.play_round()["clients"] == 0
        place.clients._patience = 30.0
        place.join("oslo", "0-4")
        assert place.federation.play_round()["clients"] == 5
    assert any("all clients have gone" in note for note in place.notes)

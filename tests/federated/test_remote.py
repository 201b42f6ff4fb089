"""Clients over links: the same bits as simulated ones, and drop-outs where they die, are late or are not admitted.

Server and clients are threads of this process, each with a model of its own; the sockets are real.
"""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.federated import certificates
from tests.federated.federations import recipe_of, weights_after
from tests.federated.places import KEYS, TOKENS, serving
from unisono.spec.errors import HangError, UsageError
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, ClientHost
from unisono_contrib.federated.organisations import Organisation, client_tls, organisations_in, server_tls

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"federated__strategy": "scaffold", "federated__codec": "topk:ratio=0.2+ef"},
        {"federated__strategy": "fedbuff:2"},
    ],
    ids=str,
)
def test_real_clients_have_the_bits_of_simulated_ones(corpus: Corpus, keys: dict, tmp_path: Path) -> None:
    authority, certificate, key = certificates.written(tmp_path)
    with serving(corpus, tls=server_tls(certificate, key), **keys) as place:
        place.join("milan", "0-2", tls=client_tls(authority))
        place.join("oslo", "3,4", tls=client_tls(authority))
        place.clients.wait_for(5, 30.0)
        for _ in range(3):
            place.federation.play_round()
    assert torch.equal(place.federation.weights, weights_after(3, corpus, **KEYS | keys))
    assert all(isinstance(played, int) and played > 0 for played in place.outcomes.values())


def test_clients_that_do_not_come_are_waited_for_so_long_and_no_longer(corpus: Corpus) -> None:
    with serving(corpus) as place, pytest.raises(HangError, match="0 of 5 clients have joined"):
        place.clients.wait_for(5, 0.1)


def test_a_client_that_dies_is_a_drop_out(corpus: Corpus) -> None:
    """It answers as one whom the seed lets drop out: the round is that of the others."""

    def dies(host: ClientHost, task: Task) -> Answer:
        raise KeyboardInterrupt

    everybody = {"federated__participation": 1, "federated__dropout": 0}
    with serving(corpus, **everybody) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=dies)
        place.clients.wait_for(5, 30.0)
        lines = [place.federation.play_round() for _ in range(2)]
    assert [(line["clients"], line["dropped"]) for line in lines] == [(4, 1)] * 2
    assert any("oslo has left" in note for note in place.notes)
    assert place.federation.weights.isfinite().all()


def test_a_client_that_is_late_is_a_drop_out_and_may_come_back(corpus: Corpus) -> None:
    waiting, answered = threading.Event(), threading.Event()

    def late(host: ClientHost, task: Task) -> Answer:
        if task.number == 0:
            waiting.wait(30)
        answer = host.play(task)
        answered.set()
        return answer

    everybody = {"federated__participation": 1, "federated__dropout": 0}
    with serving(corpus, patience=0.5, **everybody) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=late)
        place.clients.wait_for(5, 30.0)
        first = place.federation.play_round()
        second = place.federation.play_round()  # silent: nobody waits for it again
        waiting.set()
        answered.wait(30)
        place.clients._patience = 30.0
        while place.clients._members[4].silent:
            place.clients._turn(0.1)  # its late answer comes, and is not counted
        third = place.federation.play_round()
    assert [line["clients"] for line in (first, second, third)] == [4, 4, 5]


@pytest.mark.parametrize(
    "name,clients,options,why",
    [
        ("milan", "0", {"token": "n" * 20}, "token"),
        ("paris", "0", {}, "token"),
        ("milan", "3", {}, "client 3 is not milan's"),
        ("milan", "0-7", {}, "no client 7"),
        ("milan", "0", {"train__lr": 0.5}, "its train differ"),
    ],
    ids=["wrong token", "unknown", "another's client", "no such client", "another recipe"],
)
def test_who_does_not_belong_is_refused(
    corpus: Corpus, name: str, clients: str, options: dict, why: str
) -> None:
    known = {"milan": Organisation("milan", TOKENS["milan"], frozenset({0, 1, 2, 5, 6, 7}))}
    with serving(corpus, known=known) as place:
        place.join(name, clients, **options)
        place.hear_until(lambda: name in place.outcomes)
        assert not place.clients._members
    error = place.outcomes[name]
    assert isinstance(error, UsageError) and error.code == "L11" and why in error.what
    assert any("refused" in note for note in place.notes)
    assert TOKENS["milan"] not in " ".join(place.notes)


def test_a_server_with_another_certificate_is_not_joined(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, _, _ = certificates.written(tmp_path / "other")
    _, certificate, key = certificates.written(tmp_path)
    with serving(corpus, tls=server_tls(certificate, key)) as place:
        place.join("milan", "0", tls=client_tls(authority))
        place.hear_until(lambda: "milan" in place.outcomes)
    error = place.outcomes["milan"]
    assert isinstance(error, UsageError) and error.code == "L11" and "TLS" in error.what


def test_an_answer_that_is_none_counts_as_a_drop_out(corpus: Corpus) -> None:
    def lies(host: ClientHost, task: Task) -> Answer:
        answer = host.play(task)
        return Answer(
            answer.number, answer.client, answer.samples, [answer.parts[0] * float("nan")], {}, 1, 0.0
        )

    everybody = {"federated__participation": 1, "federated__dropout": 0}
    with serving(corpus, **everybody) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=lies)
        place.clients.wait_for(5, 30.0)
        line = place.federation.play_round()
    assert (line["clients"], line["dropped"]) == (4, 1)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"client": 0}, "an answer for client 0"),
        ({"number": 7}, "has not answered"),
        ({"samples": 0}, "no samples"),
    ],
    ids=["of another's client", "of another round", "of nothing"],
)
def test_an_answer_that_was_not_asked_for_is_not_counted(corpus: Corpus, changes: dict, words: str) -> None:
    everybody = {"federated__participation": 1, "federated__dropout": 0}
    with serving(corpus, patience=1.0, **everybody) as place:
        place.join("milan", "0-3")
        place.join("oslo", "4", play=lambda host, task: replace(host.play(task), **changes))
        place.clients.wait_for(5, 30.0)
        line = place.federation.play_round()
    assert (line["clients"], line["dropped"]) == (4, 1)
    assert any(words in note for note in place.notes)


def test_tokens_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[milan]\ntoken = "{"m" * 20}"\nclients = "0-2,5"\n[oslo]\ntoken = "{"o" * 20}"\n')
    known = organisations_in(str(path))
    assert known["milan"].clients == {0, 1, 2, 5} and known["oslo"].clients is None
    assert "mmm" not in repr(known)
    for text in ('[milan]\ntoken = "short"\n', "[milan]\n", "", 'milan = "x"\n', "[milan\n"):
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            organisations_in(str(path))
        assert caught.value.code == "C02"

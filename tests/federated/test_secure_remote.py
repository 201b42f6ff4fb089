"""Secure rounds between a server and four clients over real sockets: whoever leaves when, the sum is that of those who
stayed, to the bit; and nothing that the server receives shows a delta."""

import json
import re
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.federated import certificates
from tests.federated.federations import federated, recipe_of, weights_after
from tests.federated.places import Place, serving
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import ClientHost
from unisono_contrib.federated.messages import Inbox, SecureReply
from unisono_contrib.federated.organisations import Organisation, client_tls, server_tls
from unisono_contrib.federated.secure.frames import step_of
from unisono_contrib.federated.secure.messages import (
    REQUESTS,
    Advertise,
    Mask,
    PublicKeys,
    Request,
    Reveal,
    Share,
)

pytest.importorskip("cryptography", reason="the extra `federated` is not installed")
pytestmark = pytest.mark.timeout(60)
SECURE = {
    "federated__clients": 4, "federated__participation": 1, "federated__dropout": 0, "federated__rounds": 2,
    "federated__secure": "true", "federated__secure_threshold": 0.51,
}  # fmt: skip
NAMES = ("milan", "oslo", "turin", "vienna")
ORGANISATIONS = {name: Organisation(name, name * 4) for name in NAMES}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    recipe = recipe_of().recipe
    return load(recipe.data, recipe.model)


class Watched:
    """Clients 0 to 3, each a process of its own, as a thread. words: by round and client, what was under the masks."""

    def __init__(self, place: Place, leaves: Any = lambda client, number, request: False, **options: Any):
        self.words: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        self.deltas: dict[int, np.ndarray] = {}

        def reply(host: ClientHost, client: int, number: int, request: Request) -> Any:
            if leaves(client, number, request):
                raise KeyboardInterrupt
            answer = host.reply(client, number, request)
            party = host._parties[client]
            if step_of(request) == "share":
                self.words[number][client], self.deltas[client] = party._words, party.delta.numpy()
            return answer

        for client, name in enumerate(NAMES):
            place.join(name, str(client), token=name * 4, reply=reply, **options)
        place.clients.wait_for(4, 30.0)


def stepped(place: Place, before: torch.Tensor, words: dict[int, np.ndarray], number: int, lost: set[int]):
    """The weights after a round whose sum is the plain one of those that stayed."""
    federation = place.federation
    terms, counts = federation.combiner.secure, [len(part) for part in federation.parts]
    assert terms is not None
    total = sum(words[client] for client in sorted({0, 1, 2, 3} - lost))
    delta = np.ldexp(total.view(np.int64).astype(np.float64), -terms.point.fraction_bits)
    if lost:
        delta /= sum(counts[client] / sum(counts) for client in sorted({0, 1, 2, 3} - lost))
    return (before.double() + torch.from_numpy(delta)).to(before.dtype)


def test_a_secure_round_over_tls_has_the_bits_of_a_simulated_one(corpus: Corpus, tmp_path: Any) -> None:
    authority, certificate, key = certificates.written(tmp_path)
    keys = SECURE | {"privacy__clip": 0.05, "privacy__noise": 0.1, "train__dtype": "float32"}
    with serving(corpus, tls=server_tls(certificate, key), known=ORGANISATIONS, **keys) as place:
        Watched(place, tls=client_tls(authority))
        lines = [place.federation.play_round() for _ in range(2)]
    assert torch.equal(place.federation.weights, weights_after(2, corpus, **keys))
    assert all("skipped" not in line and line["clients"] == 4 for line in lines)
    assert lines[0]["bytes_received"] > 4 * 8 * place.federation.weights.numel()


@pytest.mark.parametrize("step", [kind.__name__.lower() for kind in REQUESTS])
def test_a_client_that_dies_between_two_exchanges_is_not_in_the_sum(corpus: Corpus, step: str) -> None:
    """But for one that dies when its vector has come: it is in the sum, and the others reveal its mask."""
    leaves = lambda client, number, request: client == 2 and number == 0 and step_of(request) == step
    with serving(corpus, known=ORGANISATIONS, **SECURE) as place:
        watched = Watched(place, leaves)
        before = place.federation.weights.clone()
        first = place.federation.play_round()
        lost = set() if step == "reveal" else {2}
        assert (first["clients"], first["dropped"]) == (4 - len(lost), len(lost))
        middle = place.federation.weights.clone()
        assert torch.equal(middle, stepped(place, before, watched.words[0], 0, lost))
        second = place.federation.play_round()  # without it from the start
        assert (second["clients"], second["dropped"]) == (3, 1)
    assert any("turin has left" in note for note in place.notes)
    assert second["delta_norm"] > 0.0


def test_a_client_that_is_late_for_an_exchange_drops_out_and_may_come_back(corpus: Corpus) -> None:
    waiting = threading.Event()

    def late(client: int, number: int, request: Request) -> bool:
        if client == 1 and number == 0 and step_of(request) == "mask":
            waiting.wait(30)
        return False

    with serving(corpus, patience=0.5, known=ORGANISATIONS, **SECURE) as place:
        watched = Watched(place, late)
        before = place.federation.weights.clone()
        first = place.federation.play_round()
        assert torch.equal(place.federation.weights, stepped(place, before, watched.words[0], 0, {1}))
        waiting.set()
        place.clients._patience = 30.0
        place.hear_until(lambda: not place.clients._members[1].silent)  # its late vector is not counted
        second = place.federation.play_round()
    assert [line["clients"] for line in (first, second)] == [3, 4]
    assert any("client 1 does not mask in 0.5 s" in note for note in place.notes)


def test_too_few_clients_lose_the_round_and_the_next_one_goes_on(corpus: Corpus) -> None:
    leaves = lambda client, number, request: client < 2 and step_of(request) == "mask"
    with serving(corpus, known=ORGANISATIONS, **SECURE) as place:
        Watched(place, leaves)
        before = place.federation.weights.clone()
        line = place.federation.play_round()
        assert torch.equal(place.federation.weights, before)
        assert "2 clients have sent their vectors, and secure aggregation needs 3" in line["skipped"]
        assert place.federation.play_round()["clients"] == 2  # two of two that are left


def test_a_number_beyond_the_limit_is_refused_by_its_client_alone(corpus: Corpus) -> None:
    """The server learns which parameter of which client, and not the number."""
    with serving(corpus, known=ORGANISATIONS, **SECURE, federated__secure_limit=0.25) as place:
        watched = Watched(place)
        federation = place.federation
        before = federation.weights.clone()
        assert "skipped" not in federation.play_round()
        federation.weights = before * 1e4  # from here on every client's steps are large
        line = federation.play_round()
    assert not watched.words[1] or len(watched.words[1]) < 4
    assert line["delta_norm"] == 0.0 and torch.equal(federation.weights, before * 1e4)
    assert re.fullmatch(r"client \d: \S+ is beyond the limit 0.25 of secure aggregation", line["skipped"])
    said = [note for note in place.notes if "goes on without client" in note]
    assert said and all("it has" in note for note in said)
    assert all(isinstance(played, int) for played in place.outcomes.values())  # no process has ended


def test_nothing_that_the_server_receives_shows_a_delta(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes from clients, up to the last exchange: no eight bytes of a delta or of what is under the masks are
    there, masked vectors are noise, and their sum without the reveal is not the sum."""
    came: list[bytes] = []
    feed = Inbox.feed
    server = threading.current_thread()

    def heard(inbox: Inbox, frame: bytes) -> Any:
        if threading.current_thread() is server:
            came.append(bytes(frame))
        return feed(inbox, frame)

    monkeypatch.setattr(Inbox, "feed", heard)
    with serving(corpus, known=ORGANISATIONS, **SECURE) as place:
        watched = Watched(place)
        place.federation.play_round()
        received = b"".join(came)
        terms = place.federation.combiner.secure
    assert terms is not None and len(received) > 4 * 8 * terms.numel
    for client, words in watched.words[0].items():
        telling = np.abs(words.view(np.int64)) > 1 << 20
        assert telling.sum() > 100  # small ones would be found anywhere
        delta = watched.deltas[client]
        for vector in (words, delta, delta.astype(np.float32)):
            assert not any(x.tobytes() in received for x in vector[telling])
    vectors = [frame[-8 * terms.numel :] for frame in came if len(frame) > 8 * terms.numel]
    masked = [np.frombuffer(x, dtype=np.uint64) for x in vectors]
    assert len(masked) == 4
    assert 0.49 < np.unpackbits(np.concatenate(masked).view(np.uint8)).mean() < 0.51
    plain = sum(watched.words[0].values())
    assert (sum(masked) != plain).mean() > 0.99
    kinds = [json.loads(x)["kind"] for x in came if x.startswith(b"{")]
    assert {*kinds} == {"answer", "secure"}


def test_a_client_refuses_a_server_that_asks_out_of_turn_or_for_too_few(corpus: Corpus) -> None:
    federation = federated(corpus, **SECURE)
    host: ClientHost = federation.clients._host  # type: ignore[attr-defined]
    host.play(Task(0, 1, federation.weights, 0.1))
    for wrong in (Share({}, 1.0), Mask([]), Reveal(frozenset())):
        with pytest.raises(UsageError, match="out of turn"):
            host.reply(1, 0, wrong)
    with pytest.raises(UsageError, match="has trained nothing for round 2"):
        host.reply(1, 1, Advertise(3))
    mine = host.reply(1, 0, Advertise(2))
    with pytest.raises(UsageError, match="lets 2 of 4 clients reveal; the recipe asks for 3"):
        host.reply(1, 0, Share(dict.fromkeys(range(1, 5), mine), 0.25))  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="out of turn"):
        host.reply(1, 0, Advertise(3))


def test_the_head_room_of_a_round_is_checked_before_clients_are_waited_for(corpus: Corpus) -> None:
    with pytest.raises(UsageError, match="may wrap") as caught:
        Place(corpus, known=ORGANISATIONS, **SECURE, federated__secure_limit=1e9)
    assert caught.value.code == "A02"


def test_a_reply_to_an_earlier_request_is_not_counted(corpus: Corpus) -> None:
    """A vector that was masked for another set of clients would spoil the sum."""
    with serving(corpus, known=ORGANISATIONS, **SECURE) as place:
        clients, member, late = place.clients, SimpleNamespace(clients=(1,)), PublicKeys(2, b"", b"")
        clients._awaited = {1: (1, "mask")}
        for number, step in ((0, "mask"), (1, "share")):
            clients._take_reply(member, SecureReply(1, number, step, late))
        assert clients._awaited and not clients._replies
        with pytest.raises(ValueError, match="a reply for client 3"):
            clients._take_reply(member, SecureReply(3, 1, "mask", late))
        clients._take_reply(member, SecureReply(1, 1, "mask", late))
        assert clients._replies == {1: late} and not clients._awaited

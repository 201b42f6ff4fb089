"""Secure aggregation: the sum of the survivors to the bit, whoever drops out when; and what is refused."""

import copy
import itertools
import random
from collections.abc import Mapping

import numpy as np
import pytest

from unisono.spec.errors import UsageError
from unisono_contrib.federated.secure import server
from unisono_contrib.federated.secure.client import SecureClient
from unisono_contrib.federated.secure.fixed_point import FixedPoint, Words
from unisono_contrib.federated.secure.messages import PublicKeys, Revealed, Sealed

pytest.importorskip("cryptography", reason="the extra `federated` is not installed")

SHARES, MASKS, REVEALS, ALL = range(4)
"""Before what a client drops out; ALL: never."""
POINT = FixedPoint(limit=4.0, fraction_bits=40)


def vectors(n: int, size: int = 5) -> dict[int, Words]:
    draw = np.random.default_rng(n)
    return {u: POINT.encode({"w": draw.uniform(-4.0, 4.0, size)}, u) for u in range(1, n + 1)}


class Round:
    """A round up to the vectors: who drops out before it shares does nothing."""

    def __init__(self, n: int, threshold: int, absent: frozenset[int] = frozenset()) -> None:
        self.threshold = threshold
        self.clients = {u: SecureClient(u, threshold, b"run, round 3") for u in range(1, n + 1)}
        self.directory = server.directory_of((c.advertise() for c in self.clients.values()), threshold)
        batches = [c.share(self.directory) for u, c in self.clients.items() if u not in absent]
        self.routed = server.routed(batches, threshold)

    def total(self, inputs: Mapping[int, Words], silent: frozenset[int], mute: frozenset[int]) -> Words:
        """silent: send no vector. mute: reveal nothing."""
        clients = {u: copy.copy(c) for u, c in self.clients.items() if u in self.routed}
        masked = [c.mask(self.routed[u], inputs[u]) for u, c in clients.items() if u not in silent]
        survivors = server.survivors_of(masked, self.threshold)
        revealed = [clients[u].reveal(survivors) for u in sorted(survivors - mute)]
        return server.total(masked, revealed, self.directory, self.threshold, b"run, round 3")


def plain(inputs: Mapping[int, Words], silent: frozenset[int]) -> Words:
    return sum((x for u, x in inputs.items() if u not in silent), np.zeros(5, dtype=np.uint64))


def dropping(n: int, when: int, at: tuple[int, ...]) -> frozenset[int]:
    return frozenset(u for u in range(1, n + 1) if at[u - 1] == when)


@pytest.mark.parametrize("n, threshold", [(2, 2), (3, 2), (3, 3), (4, 3)])
def test_every_drop_out_of_few_clients(n: int, threshold: int) -> None:
    """Those that leave too few are refused, and all others give the survivors' sum to the bit."""
    inputs, right, lost = vectors(n), 0, 0
    for at in itertools.product(range(4), repeat=n):
        absent, silent, mute = (dropping(n, when, at) for when in (SHARES, MASKS, REVEALS))
        gone = n - len(absent | silent | mute)
        if gone < threshold:
            with pytest.raises(UsageError, match=f"secure aggregation needs {threshold}") as caught:
                Round(n, threshold, absent).total(inputs, silent, mute)
            assert caught.value.code == "A02"
            lost += 1
        else:
            total = Round(n, threshold, absent).total(inputs, silent, mute)
            assert np.array_equal(total, plain(inputs, absent | silent)), at
            right += 1
    assert right > 0 and (lost > 0 or n == 1)


@pytest.mark.parametrize("seed", range(6))
def test_drop_outs_of_ten(seed: int) -> None:
    draw = random.Random(seed)
    left = 10 - draw.randint(0, 4)
    order = draw.sample(range(1, 11), 10)
    absent, silent, mute = (frozenset(u for u in order[left:] if draw.randrange(3) == k) for k in range(3))
    inputs = vectors(10)
    total = Round(10, 6, absent).total(inputs, silent - absent, mute - absent - silent)
    assert np.array_equal(total, plain(inputs, absent | silent))


@pytest.fixture(scope="module")
def hundred() -> Round:
    return Round(100, 51, frozenset({3, 77}))


@pytest.mark.parametrize("seed, silent, mute", [(0, 0, 0), (1, 1, 20), (2, 47, 0)])
def test_drop_outs_of_a_hundred(hundred: Round, seed: int, silent: int, mute: int) -> None:
    order = random.Random(seed).sample(sorted(hundred.routed), len(hundred.routed))
    gone, quiet = frozenset(order[:silent]), frozenset(order[silent : silent + mute])
    inputs = vectors(100)
    assert np.array_equal(hundred.total(inputs, gone, quiet), plain(inputs, gone | {3, 77}))


def test_what_the_server_sees_of_a_client_is_noise() -> None:
    """The same vector twice, in two rounds, gives messages that share nothing with it nor with each other."""
    inputs = {u: np.zeros(64, dtype=np.uint64) for u in (1, 2, 3)}
    seen = []
    for _ in range(2):
        round_ = Round(3, 2)
        seen += [c.mask(round_.routed[u], inputs[u]).vector for u, c in round_.clients.items()]
    bits = np.unpackbits(np.concatenate(seen).view(np.uint8)).mean()
    assert 0.47 < bits < 0.53
    assert len({x.tobytes() for x in seen}) == 6


def test_shares_pass_the_server_sealed() -> None:
    round_ = Round(3, 2)
    receiver = round_.clients[2]
    letter = next(m for m in round_.routed[2] if m.sender == 1)
    seed, _ = receiver._opened(letter)
    assert seed.to_bytes(66, "big")[-16:] not in letter.body
    for wrong in (letter.body[:-1] + bytes([letter.body[-1] ^ 1]), letter.body[::-1]):
        with pytest.raises(UsageError, match="changed on its way") as caught:
            receiver._opened(Sealed(1, 2, wrong))
        assert caught.value.code == "A03"
    with pytest.raises(UsageError, match="changed on its way"):
        later = copy.copy(receiver)
        later.session = b"run, round 4"
        later._opened(letter)


def test_a_client_answers_once_and_never_says_both_of_anybody() -> None:
    round_ = Round(4, 3)
    client = round_.clients[1]
    client.mask(round_.routed[1], np.zeros(2, dtype=np.uint64))
    revealed = client.reveal({1, 2, 3})
    assert set(revealed.self_masks) == {1, 2, 3} and set(revealed.keys) == {4}
    with pytest.raises(UsageError, match="asked a second time"):
        client.reveal({2, 3, 4})


def test_fewer_shares_than_the_threshold_say_nothing() -> None:
    inputs, round_ = vectors(3), Round(3, 3)
    masked = [c.mask(round_.routed[u], inputs[u]) for u, c in round_.clients.items()]
    revealed = [c.reveal({1, 2, 3}) for c in round_.clients.values()]
    with pytest.raises(UsageError, match="2 clients have revealed their shares"):
        server.total(masked, revealed[:2], round_.directory, 3, b"run, round 3")
    with pytest.raises(UsageError, match="do not give its secret"):
        server.total(masked, revealed, round_.directory, 2, b"run, round 3")


def test_wrong_shares_are_noticed() -> None:
    inputs, round_ = vectors(3), Round(3, 2)
    masked = [round_.clients[u].mask(round_.routed[u], inputs[u]) for u in (1, 2)]
    revealed = [round_.clients[u].reveal({1, 2}) for u in (1, 2)]
    wrong = Revealed(1, revealed[0].self_masks, {3: revealed[0].keys[3] + 1})
    with pytest.raises(UsageError, match="of client 3 do not give its secret"):
        server.total(masked, [wrong, revealed[1]], round_.directory, 2, b"run, round 3")


@pytest.mark.parametrize("n, threshold", [(1, 1), (2, 1), (4, 2), (10, 5), (3, 4)])
def test_a_threshold_that_is_no_majority_is_refused(n: int, threshold: int) -> None:
    with pytest.raises(
        UsageError, match=f"secure aggregation of {n} clients with a threshold of {threshold}"
    ):
        Round(n, threshold)


def test_keys_that_are_none_and_numbers_twice_are_refused() -> None:
    keys = [SecureClient(u, 2).advertise() for u in (1, 1, 2)]
    with pytest.raises(UsageError, match="numbered"):
        server.directory_of(keys, 2)
    client = SecureClient(1, 2)
    with pytest.raises(UsageError, match="low order"):
        client.share({1: client.advertise(), 2: PublicKeys(2, bytes(32), bytes(32))})
    with pytest.raises(UsageError, match="not in the directory"):
        client.share({1: keys[0], 2: keys[2]})

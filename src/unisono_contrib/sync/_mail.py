"""What one rank of a run does in the mailbox for the whole run: arrive, exchange a round, publish, leave."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.spec.errors import HangError, PeerGone, UsageError
from unisono.sync._outer import MailboxPlace
from unisono_contrib.comm.depot import depot_at
from unisono_contrib.comm.mailbox import POLLS, Letter, Mailbox, mean
from unisono_contrib.comm.mailbox.heartbeat import Heartbeats
from unisono_contrib.comm.mailbox.places import take_place
from unisono_contrib.comm.mailbox.steady import SteadyDepot

KEY = "launch.mailbox"
Facts = Mapping[str, Any]
"""JSON in which all peers have to be alike."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a run finds in the mailbox. place: its own in the order of samples. round: the newest that was published, 0
    if none was. published: with which weights and momentum that begins."""

    place: int
    round: int
    published: Mapping[str, Tensor]


class RoundResult(NamedTuple):
    """What came of a round, in numbers, so that ranks can tell each other. round: the one with which this run goes on.
    skipped: whether it leaves out rounds that others have made without it. cohort: letters that count. counted: whether
    this run's is among them. alone: whether no other's is. distance: root mean square, over peers, of the distance of
    their weights from the mean. waited: seconds. sent, received: bytes."""

    round: float
    skipped: float
    cohort: float
    counted: float
    alone: float
    distance: float
    waited: float
    sent: float
    received: float


@dataclass(frozen=True, slots=True)
class Met:
    """What came of a round. tensors: the mean of what peers have posted; after `skipped` rounds, what was published."""

    outcome: RoundResult
    tensors: Mapping[str, Tensor]


class Mail:
    """The mailbox of one run. facts: see `Facts`. Methods may take minutes. Raises UsageError: E01 and C02 for a URL
    that means nothing, E02 where the store does not answer, L05 where peers are not alike; HangError (H01)."""

    def __init__(self, place: MailboxPlace, facts: Facts) -> None:
        self._place, self._facts = place, facts
        self._depot = SteadyDepot(depot_at(place.url, KEY), KEY)
        self._box = Mailbox(self._depot, place.peer, alive_s=place.alive_s, sleep=self._sleep)
        self._left = threading.Event()
        self._heart: Heartbeats | None = None

    def arrive(self) -> Arrival:
        """Find this run's place, waiting for the peers that begin together, and what was published last."""
        self._box.beat(0)
        self._heart = Heartbeats(self._box)
        place = self._take_place()
        round, published = self._box.join()
        self._check([published] if published is not None else [])
        return Arrival(place, round, published.tensors if published is not None else {})

    def _take_place(self) -> int:
        begun, waited = time.monotonic(), 0.0
        living = lambda: [peer.name for peer in self._box.peers()]
        for pause in chain(POLLS, repeat(POLLS[-1])):
            self._checked_heart()
            place = take_place(self._depot, self._place.peer, living, self._place.peers)
            if place is not None:
                return place
            if (waited := time.monotonic() - begun) > self._place.patience_s:
                break
            self._sleep(pause)
        raise HangError(
            f"{len(living())} of {self._place.peers} peers have come in {waited:.0f} s",
            where=KEY,
            likely="peers that were not started, or with another mailbox",
            fix="start them, or --launch.peers with fewer",
        )

    def _sleep(self, seconds: float) -> None:
        if self._left.wait(seconds):
            raise PeerGone("this peer has left", where=KEY)

    def abandon(self) -> None:
        """End the exchange that is under way on another thread, which nobody waits for any more."""
        self._left.set()

    def post(self, round: int, tensors: Mapping[str, Tensor], tokens: float) -> None:
        """Post what this run has learnt in a round, and wait for nobody."""
        self._box.post(round, tensors, tokens, self._facts)

    def exchange(self, round: int, tensors: Mapping[str, Tensor], tokens: float) -> Met:
        """Post what this run has learnt in a round, and take what counts of all."""
        begun, sent, received = time.monotonic(), self._depot.sent, self._depot.received
        self._checked_heart()
        self.post(round, tensors, tokens)
        place, newest, letters = self._place, None, tuple[Letter, ...]()
        try:
            letters = self._box.collect(round, place.quorum, place.grace_s, place.patience_s)
        except PeerGone:
            if self._left.is_set():
                raise
            newest = self._box.join()
        self._check(letters)
        counted = any(letter.peer == place.peer for letter in letters)
        if letters and not counted and (ahead := self._box.join())[0] > round + 1:
            newest = ahead
        traffic = self._depot.sent - sent, self._depot.received - received
        waited = time.monotonic() - begun
        if newest is not None and (published := newest[1]) is not None:
            number = newest[0]
            self._check([published])
            outcome = RoundResult(number, True, len(letters), False, False, 0.0, waited, *traffic)
            return Met(outcome, published.tensors)
        average = mean(letters)
        alone, apart = counted and len(letters) == 1, distance(letters, average)
        outcome = RoundResult(round + 1, False, len(letters), counted, alone, apart, waited, *traffic)
        return Met(outcome, average)

    def publish(self, round: int, state: Mapping[str, Tensor]) -> int:
        """Have others begin `round` with this state, if it is this run's turn to say so; returns bytes sent."""
        sent = self._depot.sent
        self._box.publish(round, state, self._facts)
        return self._depot.sent - sent

    def close(self) -> None:
        """Leave. Where the store does not answer, others find out after `alive_s` seconds."""
        if self._heart is not None:
            self._heart.close()
            with suppress(Exception):  # each store has its own
                self._box.leave()

    def _checked_heart(self) -> None:
        if self._heart is not None:
            self._heart.check()

    def _check(self, letters: Sequence[Letter]) -> None:
        """Raises UsageError (L05) where a peer plays something else."""
        for letter in letters:
            for key, value in self._facts.items():
                if letter.meta.get(key) != value:
                    raise UsageError(
                        f"peer {letter.peer} has {key} {letter.meta.get(key)}, this one, {self._place.peer}, {value}",
                        where=KEY,
                        likely="peers that were started with other options",
                        fix="start all peers alike, or another mailbox",
                        code="L05",
                    )


def distance(letters: Sequence[Letter], average: Mapping[str, Tensor]) -> float:
    """Root mean square over peers of the distance of what they have learnt from the mean, buffers left out."""
    squares = [
        sum(
            float(torch.sum((x - average[name]).double() ** 2))
            for name, x in letter.tensors.items()
            if not name.startswith(BUFFER)
        )
        for letter in letters
    ]
    return (sum(squares) / len(squares)) ** 0.5


BUFFER = "buffer/"
"""Before the names of what steps change beside weights."""

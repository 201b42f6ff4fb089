"""Exchange between peers that have no connection: through a folder, or whatever fsspec knows by its URL.

    box = open_mailbox("s3://bucket/run", peer="milan")
    round, start = box.join()
    while training:
        box.post(round, deltas, weight=tokens)
        letters = box.collect(round, quorum=3, grace_s=60)
        apply(mean(letters)); round += 1
        box.publish(round, outer_state)

Peers need not reach each other, so that neither NAT nor a firewall matters (GradientMail, 2026; the merge by tokens,
the quorum and its grace are those of Decoupled DiLoCo, 2026). In the folder lie

    peers/PEER.json             a heartbeat: its number changes as long as the peer lives
    rounds/00000007/PEER.json   a letter, with its body beside it (see `letters`)
    rounds/00000007/cohort      whose letters count in this round, decided once
    outer/00000007/PEER.json    with which weights round 7 begins, for who joins

Whose letters count is decided by one peer, the first by name of those who live and have posted, and written where
nothing is yet. So all compute the same bits, even if a letter comes while some have given up waiting for it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from torch import Tensor

from unisono.spec.errors import HangError, PeerGone, UsageError
from unisono.spec.words import listed
from unisono_contrib.comm.depot import Depot, depot_at
from unisono_contrib.comm.mailbox.letters import (
    PEER,
    SEAL,
    Letter,
    create,
    mean,
    post,
    read,
    sealed,
    unsealed,
    whole,
)

__all__ = ["Letter", "Mailbox", "Peer", "mean", "open_mailbox"]

COHORT = "cohort"
POLLS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between looks, the last of them for as long as it takes."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that lives. round: the one that it is working for."""

    name: str
    round: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What was seen of a peer's heartbeat. said: what it says. since: by our clock, when that came."""

    said: Mapping[str, Any]
    since: float


def open_mailbox(url: str, peer: str, key: str = "mailbox", **options: Any) -> "Mailbox":
    """The mailbox at a URL, for this peer. key: the option that named it, for errors. Raises UsageError."""
    return Mailbox(depot_at(url, key), peer, **options)


class Mailbox:
    """A peer's view of the folder. It keeps no more than what it has seen of heartbeats.

    alive_s: seconds after which a heartbeat that has not changed is a dead peer's, by this peer's clock alone; others'
    clocks do not matter. keep: rounds that stay in the folder. clock, sleep: seconds, for tests.
    """

    def __init__(
        self,
        depot: Depot,
        peer: str,
        *,
        alive_s: float = 60.0,
        keep: int = 2,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not PEER.fullmatch(peer):
            what = f"{peer!r} names no peer"
            raise UsageError(what, where="the mailbox", fix="letters, digits, - and _, up to 64", code="C02")
        self.depot, self.peer, self.alive_s, self.keep = depot, peer, alive_s, keep
        self._clock, self._sleep = clock, sleep
        self._session, self._beats, self._round = secrets.token_hex(8), 0, 0
        self._beat_at = -float("inf")
        self._seen: dict[str, Heartbeat] = {}
        self._beating = threading.Lock()
        self._last_letter: Letter | None = None

    def beat(self, round: int | None = None) -> None:
        """Say that this peer lives and, from now on, works for `round`. To be called more often than every `alive_s`
        seconds; it writes a third as often. Raises UsageError (L05) where another process has this peer's name. Threads
        may call it at once."""
        with self._beating:
            self._beat(round)

    def _beat(self, round: int | None) -> None:
        now, before = self._clock(), self._round
        self._round = before if round is None else round
        if self._round == before and now - self._beat_at < self.alive_s / 3:
            return
        path = f"peers/{self.peer}{SEAL}"
        last = unsealed(self.depot, path)
        if self._beats and last is not None and last.get("session") != self._session:
            what = f"another process has become peer {self.peer} of this mailbox"
            raise UsageError(what, where="the mailbox", fix="a name for each peer", code="L05")
        self._beats, self._beat_at = self._beats + 1, now
        said = {"session": self._session, "beat": self._beats, "round": self._round}
        self.depot.write(path, sealed(said))

    def leave(self) -> None:
        """Let others wait for this peer no longer."""
        _drop(self.depot, [f"peers/{self.peer}{SEAL}"])

    def peers(self) -> tuple[Peer, ...]:
        """Who lives, by name: peers whose heartbeat has changed in the last `alive_s` seconds, or is new to us."""
        now, seen = self._clock(), {}
        for name in self._sealed("peers"):
            said = unsealed(self.depot, f"peers/{name}{SEAL}")
            before = self._seen.get(name)
            if said is None:  # it is being written
                said = before.said if before else None
            if said is not None:
                seen[name] = before if before and before.said == said else Heartbeat(said, now)
        self._seen = seen
        living = (name for name, beat in seen.items() if now - beat.since < self.alive_s)
        return tuple(Peer(name, int(seen[name].said.get("round", 0))) for name in living)

    def post(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        weight: float = 1.0,
        meta: Mapping[str, Any] | None = None,
    ) -> bool:
        """Post what this peer has for a round; whether it is its first letter of the round, which counts. weight: what
        it counts for, such as tokens. meta: JSON. Raises UsageError (L05)."""
        self.beat(round)
        letter = Letter(self.peer, round, weight, {name: whole(x) for name, x in tensors.items()}, meta or {})
        first = post(self.depot, _round(round), letter)
        self._last_letter = letter if first else None
        return first

    def collect(
        self, round: int, quorum: int = 0, grace_s: float = 0.0, patience_s: float = 600.0
    ) -> tuple[Letter, ...]:
        """The letters that count in a round, by their peers' names: the same ones for all who ask, this peer's not
        among them if it came too late.

        Waits for the letters of all who live and have not left this round behind. quorum: letters for which nobody
        waits longer than `grace_s` seconds more; 0 for all. Raises HangError (H01) after `patience_s` seconds, and
        PeerGone (R03) where the round is over and gone, so that this peer has to join anew.
        """
        begun, letters, enough = self._clock(), dict[str, Letter](), None
        if self._last_letter is not None and self._last_letter.round == round:
            letters[self.peer] = self._last_letter  # as it lies there, and need not be fetched
        for pause in chain(POLLS, repeat(POLLS[-1])):
            self.beat(round)
            cohort = self._cohort(round)
            for peer in self._sealed(_round(round)) if cohort is None else cohort:
                if peer not in letters and (letter := read(self.depot, _round(round), peer)) is not None:
                    letters[peer] = letter
            if cohort is not None and all(peer in letters for peer in cohort):
                return tuple(letters[peer] for peer in cohort)
            now = self._clock()
            if cohort is None:
                self._refuse_what_is_gone(round)
                living = self.peers()
                missing = [peer.name for peer in living if peer.round <= round and peer.name not in letters]
                if quorum and len(letters) >= quorum and enough is None:
                    enough = now
                over = not missing and len(letters) >= quorum
                late = enough is not None and now - enough >= grace_s
                if letters and (over or late) and self._is_first(living, letters):
                    create(self.depot, f"{_round(round)}/{COHORT}", {"cohort": sorted(letters)})
                    continue
            else:
                missing = [peer for peer in cohort if peer not in letters]
            if now - begun > patience_s:
                raise _hang(round, sorted(letters), missing, quorum, now - begun)
            self._sleep(pause)
        raise AssertionError("polls do not end")

    def _is_first(self, living: Sequence[Peer], names: Collection[str]) -> bool:
        """Whether this peer is the first by name of those who live, among `names`; or nobody of these does."""
        return min((peer.name for peer in living if peer.name in names), default=self.peer) == self.peer

    def _cohort(self, round: int) -> list[str] | None:
        said = unsealed(self.depot, f"{_round(round)}/{COHORT}")
        return None if said is None else list(said["cohort"])

    def _refuse_what_is_gone(self, round: int) -> None:
        """Raise PeerGone if a round was over so long ago that its letters have been dropped."""
        latest = max(self._numbers("outer"), default=0)
        if latest > round + self.keep and self._cohort(round) is None:
            raise PeerGone(
                f"round {round} is over, and its letters are gone: others begin round {latest}",
                where=f"peer {self.peer} of the mailbox",
                fix="join again, and go on from the outer weights that are there",
            )

    def publish(self, round: int, state: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> bool:
        """Have it read with which weights `round` begins, by whoever joins; whether it was this peer that wrote them,
        which the first by name of those does who live and whose letters counted in the round before. What nobody needs
        any more goes: old rounds, and heartbeats of peers that have been dead for long."""
        self.beat(round)
        living = self.peers()
        if not self._is_first(living, self._cohort(round - 1) or [peer.name for peer in living]):
            return False
        if self._sealed(_outer(round)):  # by a peer that has left since
            return False
        post(self.depot, _outer(round), Letter(self.peer, round, 1.0, state, meta or {}))
        old = (n for n in self._numbers("rounds") if n < round - self.keep)
        begun = (n for n in self._numbers("outer") if n < round - self.keep + 1)
        for folder in (*map(_round, old), *map(_outer, begun)):
            _drop(self.depot, [*(f"{folder}/{name}" for name in self.depot.names(folder)), folder])
        dead = (name for name, beat in self._seen.items() if self._clock() - beat.since > 4 * self.alive_s)
        _drop(self.depot, [f"peers/{name}{SEAL}" for name in dead])
        return True

    def join(self) -> tuple[int, Letter | None]:
        """(the round to begin with, the outer weights and what else was published with them) of the last round that was
        published whole; (0, None) where nobody has published."""
        for number in sorted(self._numbers("outer"), reverse=True):
            for peer in self._sealed(_outer(number)):
                if (letter := read(self.depot, _outer(number), peer)) is not None:
                    self.beat(number)
                    return number, letter
        self.beat(0)
        return 0, None

    def _sealed(self, folder: str) -> list[str]:
        """Of whom there is something in a folder, by name."""
        return sorted(
            name.removesuffix(SEAL)
            for name in self.depot.names(folder)
            if name.endswith(SEAL) and not name.startswith(".")
        )

    def _numbers(self, folder: str) -> Iterator[int]:
        return (int(name) for name in self.depot.names(folder) if name.isdigit())


def _round(number: int) -> str:
    return f"rounds/{number:08d}"


def _outer(number: int) -> str:
    return f"outer/{number:08d}"


def _drop(depot: Depot, paths: Sequence[str]) -> None:
    """Whatever of it is there: another may drop it too. Stores without folders have none to drop."""
    for path in paths:
        try:
            depot.drop(path)
        except OSError:
            continue


def _hang(
    round: int, letters: Sequence[str], missing: Sequence[str], quorum: int, waited: float
) -> HangError:
    came = f"{len(letters)} letters have come ({listed(letters, 3) or 'none'})"
    lacks = (
        f"of a quorum of {quorum}" if quorum > len(letters) else f"and those of {listed(missing, 3)} have not"
    )
    return HangError(
        f"round {round} of the mailbox is not over after {waited:.0f} s: {came}, {lacks}",
        where="the mailbox",
        likely="a peer that lives and does not post, or fewer peers than the quorum",
        fix="a lower quorum with a grace, or more peers",
    )

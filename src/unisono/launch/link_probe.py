"""How quick a link is, measured by messages that the other side answers. Pure: no socket, no clock, no torch.

A few of a byte tell its delay. Then come rounds of pieces, each of twice as many as the one before, until a round takes
long enough to tell a rate. So a slow link is asked for a few pieces, not for seconds in which nothing else passes.
"""

from dataclasses import dataclass, field

PIECE = 1 << 15
"""Bytes of one message of a round."""
_SMALL, _MOST = 3, 16
_LONG = 0.3
"""Seconds of a round that tells a rate."""


@dataclass
class LinkProbe:
    """delay: seconds of a small message one way. rate: bit/s, 0 until it is known. number: of the messages that count,
    so that an answer to a probe before this one is none."""

    delay: float = 0.0
    rate: float = 0.0
    number: int = 0
    _small: list[float] = field(default_factory=list)
    _began: float = 0.0
    _pieces: int = 0
    _answers: list[float] = field(default_factory=list)

    def begin(self, now: float) -> list[int]:
        """Bytes of the messages to send at first."""
        self.number += 1
        self._small, self._pieces = [], 0
        return self._ask(1, now)

    def answered(self, number: int, now: float) -> list[int]:
        """Bytes of the messages to send after an answer to one of that number; none while others are awaited, or at the
        end."""
        if number != self.number:
            return []
        if len(self._small) < _SMALL:
            self._small.append(now - self._began)
            return self._ask(1 if len(self._small) < _SMALL else PIECE, now)
        self._answers.append(now)
        if len(self._answers) < self._pieces:
            return []
        took = now - self._began
        self.delay, self.rate = min(self._small) / 2, self._measured(took)
        if took >= _LONG or self._pieces >= _MOST:
            return []
        return self._ask(PIECE, now, 2 * self._pieces)

    def _ask(self, nbytes: int, now: float, times: int = 1) -> list[int]:
        self._began, self._pieces, self._answers = now, times, []
        return [nbytes] * times

    def _measured(self, took: float) -> float:
        """Bit/s of the round that is over: of several pieces, from the first to the last, for the first waits until the
        connection is up to speed."""
        first, last = self._answers[0], self._answers[-1]
        pieces, seconds = (self._pieces - 1, last - first) if self._pieces > 2 else (self._pieces, took)
        return 8 * PIECE * pieces / max(seconds - (min(self._small) if self._pieces <= 2 else 0.0), 1e-4)

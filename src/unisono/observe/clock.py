"""One clock for all hosts: how far this host's is from the reference's, and how fast that changes.

As in the Network Time Protocol (Mills, RFC 5905): the reference says its time, and its answer was made in the middle
between question and answer, give or take half of what both took. Of several the quickest is believed most. A line
through what was measured over the last minutes is the offset and its drift.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

BURST = 8
"""Questions asked one after the other, of which the quickest counts."""
FIRST_S, LAST_S = 0.25, 8.0
"""Seconds between two bursts: at first, doubled each time, and at last."""
KEPT = 64
_ENOUGH_NS = 5_000_000  # for a burst: the next step waits
_ASIDE_NS = 5_000  # how far apart two equally quick answers may be
_JUMP_NS = 5_000_000  # further from the line than any oscillator drifts between two bursts
_DRIFTS_NS = 2_000_000_000  # of bursts, from first to last, before they say how fast a clock drifts


@dataclass(frozen=True, slots=True)
class OffsetSample:
    """One answer. at_ns: this host's clock in the middle between question and answer. offset_ns: what has to be added
    to it. round_ns: between question and answer."""

    at_ns: int
    offset_ns: int
    round_ns: int


class ClockFit:
    """A line through offsets, the quick answers' first. Pure: it reads no clock.

    fit = ClockFit(); fit.add(OffsetSample(at_ns=0, offset_ns=3_000_000_000, round_ns=80_000)); fit.offset_ns(10**9)
    """

    def __init__(self) -> None:
        self._samples: deque[OffsetSample] = deque(maxlen=KEPT)
        self._base_ns, self._at_base_ns, self.drift = 0, 0.0, 0.0
        self.error_ns = 0.0
        """What an offset may be wrong by, if what an answer takes there and back differs as much as it can."""

    def __bool__(self) -> bool:
        return bool(self._samples)

    def add(self, sample: OffsetSample) -> bool:
        """One more answer, later than those before. Returns whether the clock has jumped since, or its host slept: then
        what was measured before counts no more."""
        off = abs(sample.offset_ns - self.offset_ns(sample.at_ns))
        jumped = bool(self._samples) and off > sample.round_ns / 2 + self.error_ns + _JUMP_NS
        if jumped:
            self._samples.clear()
        self._samples.append(sample)
        self._fit(sample)
        return jumped

    def _fit(self, sample: OffsetSample) -> None:
        quickest = min(s.round_ns for s in self._samples)
        weights = [1.0 / ((s.round_ns - quickest) / 2 + _ASIDE_NS) ** 2 for s in self._samples]
        total = sum(weights)
        base, first = sample.at_ns, self._samples[0].offset_ns
        # Small numbers: nanoseconds since 1970 have more digits than a double.
        x = [(s.at_ns - base) * 1e-9 for s in self._samples]
        y = [float(s.offset_ns - first) for s in self._samples]
        x_mean = sum(w * v for w, v in zip(weights, x, strict=True)) / total
        y_mean = sum(w * v for w, v in zip(weights, y, strict=True)) / total
        spread = sum(w * (v - x_mean) ** 2 for w, v in zip(weights, x, strict=True))
        together = sum(w * (a - x_mean) * (b - y_mean) for w, a, b in zip(weights, x, y, strict=True))
        known = sample.at_ns - self._samples[0].at_ns >= _DRIFTS_NS and spread > 0
        self.drift = together / spread if known else 0.0  # nanoseconds a second
        best = min(self._samples, key=lambda s: (s.round_ns, -s.at_ns))
        now = y_mean - self.drift * x_mean if known else float(best.offset_ns - first)
        self._base_ns, self._at_base_ns = base, now + first
        self.error_ns = best.round_ns / 2

    def offset_ns(self, at_ns: int) -> int:
        """What has to be added to this host's time `at_ns`; 0 where nothing was measured."""
        return round(self._at_base_ns + self.drift * (at_ns - self._base_ns) * 1e-9)


class HostClock:
    """Unix time in nanoseconds of moments of a recorder's clock. epoch_ns: this host's Unix time at that clock's zero.

    reference: asks for the time of the clock that all hosts go by; None where nobody answers, and this host's is taken.
    skew(at_ns): how far this host's clock is made wrong, for trials.
    """

    def __init__(self, epoch_ns: int, clock: Callable[[], int]) -> None:
        self.reference: Callable[[], int] | None = None
        self.skew: Callable[[int], int] = lambda at_ns: 0
        self.fit = ClockFit()
        self._epoch_ns, self._clock = epoch_ns, clock
        self._due_ns, self._pause_s = 0, FIRST_S

    def here_ns(self, at_ns: int) -> int:
        """As this host's own clock has it."""
        return at_ns + self._epoch_ns + self.skew(at_ns)

    def shared_ns(self, at_ns: int) -> int:
        """As the reference's clock has it, as far as is known."""
        here = self.here_ns(at_ns)
        return here + self.fit.offset_ns(here)

    def ask(self) -> None:
        """Ask the reference if it is time to: about a millisecond, every few seconds. What fails is asked later."""
        now = self._clock()
        if self.reference is None or now < self._due_ns:
            return
        self._due_ns = now + int(self._pause_s * 1e9)
        self._pause_s = min(LAST_S, 2 * self._pause_s)
        try:
            samples = [self._sample(self.reference)]  # also where this process was put aside meanwhile
            while len(samples) < BURST and self._clock() - now < _ENOUGH_NS:
                samples.append(self._sample(self.reference))
        except (OSError, RuntimeError, ValueError):
            return
        if self.fit.add(min(samples, key=lambda sample: sample.round_ns)):
            self._pause_s = FIRST_S

    def _sample(self, reference: Callable[[], int]) -> OffsetSample:
        before = self.here_ns(self._clock())
        said = reference()
        after = self.here_ns(self._clock())
        middle = (before + after) // 2
        return OffsetSample(middle, said - middle, after - before)

    def says(self) -> dict[str, float]:
        """What was taken out of this host's time, in microseconds; {} where nothing was measured."""
        if not self.fit:
            return {}
        offset = self.fit.offset_ns(self.here_ns(self._clock()))
        return {"offset_us": round(offset / 1e3, 1), "error_us": round(self.fit.error_ns / 1e3, 1)}


def epoch_of(clock: Callable[[], int]) -> int:
    """Unix time in nanoseconds at the zero of a clock of this process."""
    # A process that is put aside between two readings makes it too early, never too late.
    return max(time.time_ns() - clock() for _ in range(5))

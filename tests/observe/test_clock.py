"""One clock for all hosts: offsets and drift from answers that come sooner or later."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.observe.clock import BURST, ClockFit, HostClock, OffsetSample

SECOND = 10**9
US = 1000


class Host:
    """A host whose clock is `shift` seconds ahead and gains `ppm`, and a reference that answers over a link: it takes
    `least` microseconds each way, and at times much more one way. True time passes as they talk."""

    def __init__(self, shift: float, ppm: float, least: float, seed: int) -> None:
        self.now, self.luck, self.least = 1_700_000_000 * SECOND, random.Random(seed), least
        self.began = self.now
        self.clock = HostClock(0, lambda: self.now)
        self.clock.skew = lambda at: int(shift * SECOND + (at - self.began) * ppm * 1e-6)
        self.clock.reference = self.answer

    def answer(self) -> int:
        self.now += self._way()
        said = self.now
        self.now += self._way()
        return said

    def _way(self) -> int:
        """Mostly quick; one message in four waits for a core, up to a slice of the scheduler."""
        late = self.luck.uniform(0, 4000) if self.luck.random() < 0.25 else self.luck.expovariate(1 / 20)
        return int((self.least + late) * US)

    def runs(self, seconds: float, step: float) -> list[float]:
        """Steps of so many seconds; after each, by how many microseconds the shared clock is wrong."""
        errors = []
        until = self.now + seconds * SECOND
        while self.now < until:
            self.clock.ask()
            self.now += int(step * SECOND)
            errors.append((self.clock.shared_ns(self.now) - self.now) / US)
        return errors


@settings(max_examples=40, deadline=None)
@given(
    shift=st.sampled_from([-3.0, 3.0, 0.0, -3600.0]),
    ppm=st.floats(-50, 50),
    least=st.floats(10, 500),
    step=st.floats(0.02, 1.0),
    seed=st.integers(0, 999),
)
def test_seconds_and_fifty_ppm_are_taken_out(
    shift: float, ppm: float, least: float, step: float, seed: int
) -> None:
    host = Host(shift, ppm, least, seed)
    errors = host.runs(60, step)
    settled = errors[len(errors) // 6 :]
    assert max(map(abs, settled)) < 200


def test_a_clock_that_nobody_answers_is_taken_as_it_is() -> None:
    clock = HostClock(5, lambda: 100)
    clock.ask()
    assert clock.shared_ns(100) == 105 and clock.says() == {}
    clock.reference = lambda: (_ for _ in ()).throw(RuntimeError("the launcher has gone"))
    clock.ask()
    assert clock.shared_ns(100) == 105 and clock.says() == {}


def test_it_is_asked_often_at_first_and_seldom_later() -> None:
    now, asked = [0], list[int]()
    clock = HostClock(0, lambda: now[0])

    def answer() -> int:
        asked.append(now[0])
        return now[0]

    clock.reference = answer
    for _ in range(3000):
        clock.ask()
        now[0] += SECOND // 50
    bursts = sorted(set(asked))
    assert len(asked) == BURST * len(bursts) and 8 <= len(bursts) <= 14
    assert bursts[1] - bursts[0] < SECOND and bursts[-1] - bursts[-2] >= 8 * SECOND


def test_a_clock_that_jumps_is_believed_at_once() -> None:
    """A host that slept: what was measured before is of another time."""
    fit = ClockFit()
    for second in range(20):
        assert not fit.add(OffsetSample(second * SECOND, 1000 * US + second * 50 * US, 100 * US))
    assert fit.drift == pytest.approx(50 * US, rel=0.01)
    assert fit.offset_ns(30 * SECOND) == pytest.approx(2500 * US, abs=5 * US)
    assert fit.add(OffsetSample(40 * SECOND, 3 * SECOND, 100 * US))
    assert fit.offset_ns(40 * SECOND) == 3 * SECOND


def test_slow_answers_move_the_line_little() -> None:
    fit = ClockFit()
    for second in range(10):
        fit.add(OffsetSample(second * SECOND, 0, 100 * US))
    fit.add(OffsetSample(10 * SECOND, 1500 * US, 3000 * US))
    assert abs(fit.offset_ns(10 * SECOND)) < 5 * US and fit.error_ns == 50 * US


def test_a_process_that_is_put_aside_before_the_first_question_asks_it_all_the_same() -> None:
    ticks = itertools.count(step=10_000_000)  # 10 ms between any two looks at the clock
    clock = HostClock(0, lambda: next(ticks))
    clock.reference = lambda: 7
    clock.ask()
    assert clock.fit and clock.fit.error_ns == 5_000_000

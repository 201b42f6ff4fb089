"""Frames on their way: none early, none lost, none overtakes."""

from hypothesis import given
from hypothesis import strategies as st

from unisono_contrib.lab.relay import Transit

MOMENTS = st.lists(st.floats(0, 1, allow_nan=False), max_size=30).map(sorted)


@given(MOMENTS, MOMENTS, st.floats(0, 2))
def test_none_is_early_lost_or_overtaken(put: list[float], looked: list[float], hold: float) -> None:
    transit, came = Transit(hold), []
    events = sorted([(at, 0, n) for n, at in enumerate(put)] + [(at, 1, 0) for at in looked])
    for at, kind, number in events:
        if kind == 0:
            transit.put(at, number % 3, bytes([number]))
        else:
            for to, frame in transit.due(at):
                assert put[frame[0]] + hold <= at
                assert to == frame[0] % 3
                came.append(frame[0])
    came += [frame[0] for _, frame in transit.due(4.0)]
    assert came == list(range(len(put)))
    assert transit.patience(4.0) is None


def test_it_waits_as_long_as_the_first_takes() -> None:
    transit = Transit(0.25)
    assert transit.patience(0.0) is None
    transit.put(1.0, 0, b"a")
    transit.put(1.1, 0, b"b")
    assert transit.patience(1.0) == 0.25
    assert transit.patience(2.0) == 0.0

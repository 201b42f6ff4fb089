"""In which order slices depart: once each, the most urgent of those that wait, and the link is never left idle."""

from hypothesis import given
from hypothesis import strategies as st

from unisono_contrib.sync._priority import timetable

slices = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=12
)


def played(some, window=2):
    ready, seconds, urgent = (list(map(float, column)) for column in zip(*some, strict=True))
    return timetable(ready, seconds, list(map(int, urgent)), window)


@given(slices, st.integers(1, 4))
def test_each_slice_departs_once_and_the_window_holds(some, window):
    order = played(some, window)
    assert sorted(at for at, _ in order) == list(range(len(some)))
    assert all(limit >= window for _, limit in order)


@given(slices)
def test_what_is_ready_at_once_departs_by_its_turn(some):
    order = played([(0, seconds, urgent) for _, seconds, urgent in some])
    assert [some[at][2] for at, _ in order] == sorted(urgent for _, _, urgent in some)


@given(slices)
def test_a_quick_link_sends_as_gradients_come(some):
    """None waits, so none can be overtaken."""
    apart = [(40 * at, 1, urgent) for at, (_, _, urgent) in enumerate(some)]
    assert [at for at, _ in played(apart)] == list(range(len(some)))


def test_an_early_layer_overtakes_those_that_wait_and_none_that_is_on_its_way():
    # Layers 3 2 1 0 come one after the other; the link takes three times as long.
    order = played([(0, 30, 3), (10, 30, 2), (20, 30, 1), (30, 30, 0)], window=1)
    assert [at for at, _ in order] == [0, 3, 2, 1]


def test_a_long_pause_between_gradients_is_filled():
    """Ten slices come together and the next gradient much later: all that the link can take until then depart."""
    order = played([(0, 1, 9)] * 10 + [(8, 1, 0)], window=2)
    assert [at for at, _ in order].index(10) == 8
    assert max(limit for _, limit in order) == 8

"""The closed forms of timetables are those of the timetables that `programs` makes."""

from itertools import product

import pytest

from tests.planner.costs import Costs, fitted, played, slowest
from unisono.planner.timetables import chunks, copies, ends, idle, in_flight, serves
from unisono.programs.pipeline import Timetable, peak_held
from unisono.programs.schedules import SCHEDULES
from unisono.spec.numbers import either, larger, smaller
from unisono_contrib.programs.schedules.zb1p import Zb1p

NAMES = (
    "gpipe", "1f1b", "interleaved:v=2", "interleaved:v=3", "looped_bfs:v=2", "looped_bfs:v=3", "zb1p", "zb2p",
    "zbv", "dualpipe", "dualpipev",
)  # fmt: skip
LAYERS = 1000
SIZES = [(ranks, micros) for ranks in (2, 3, 4, 6) for micros in (1, 2, 3, 4, 6, 8, 12, 18)]
EQUAL, PLAIN, AGAIN = Costs(1, 1, 1), Costs(2, 3, 1), Costs(1, 2, 1)


def made(name: str, ranks: int, micros: int, costs: Costs) -> Timetable:
    own = SCHEDULES.read(name)
    if isinstance(own, Zb1p):
        return fitted(ranks, micros, own.memory, costs)
    return own.timetable(ranks, micros)


def waits(name: str, timetable: Timetable, costs: Costs) -> float:
    """Seconds in which the slowest row waits, overlapped pairs as long as their parts."""
    share = timetable.length / len(timetable.rows)
    together = costs.whole / share if name.startswith("dual") else None
    placed = played(timetable, costs, together)
    span = slowest(placed) if timetable.splits_backward else max(p.stop for p in placed)
    return span - timetable.micros * costs.whole


def closed(name: str, ranks: int, micros: int, costs: Costs) -> float:
    return idle(name, ranks, micros, costs.forward, costs.backward + costs.weight, costs.weight)


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_are_those_of_the_timetable(name: str) -> None:
    what_is_idle(name)
    promises(name)
    what_is_held(name)
    places(name)
    what_is_served(name)
    arrays(name)


def what_is_idle(name: str) -> None:
    """Seconds that the closed form says a row is idle are those that the timetable waits."""
    served = [size for size in SIZES if serves(name, *size, LAYERS)]
    assert len(served) >= 4
    for (ranks, micros), costs in product(served, (EQUAL, AGAIN, PLAIN)):
        waited, said = (
            waits(name, made(name, ranks, micros, costs), costs),
            closed(name, ranks, micros, costs),
        )
        if costs == EQUAL or not name.startswith("dual"):
            assert said == pytest.approx(waited), (ranks, micros, costs)
        else:
            assert waited <= said + 1e-9 and said <= 1.5 * waited + 2 * costs.whole, (ranks, micros, costs)


def promises(name: str) -> None:
    """The timetable waits no longer than is said, where weights are the least part (DualPipes: and forwards the next)."""
    for (ranks, micros), (f, b) in product(SIZES, ((5, 1), (3, 2), (3, 3), (1, 4))):
        if serves(name, ranks, micros, LAYERS) and not (f > b and name.startswith("dual")):
            costs = Costs(f, b, 1)
            waited = waits(name, made(name, ranks, micros, costs), costs)
            assert waited <= closed(name, ranks, micros, costs) + 1e-9, (ranks, micros, costs)


def what_is_held(name: str) -> None:
    """Micro-batches that a row holds are those that the timetable holds."""
    for ranks, micros in SIZES:
        if not serves(name, ranks, micros, LAYERS):
            continue
        timetable = made(name, ranks, micros, AGAIN)
        share = timetable.length / ranks
        held = [count / share for count in peak_held(timetable)]
        said = [in_flight(name, row, ranks, micros) for row in range(ranks)]
        if name in ("zb2p", "zbv"):
            assert all(a <= b for a, b in zip(held, said, strict=True)), (ranks, micros)
            assert max(held) == max(said), (ranks, micros)
        else:
            assert held == said, (ranks, micros)


def places(name: str) -> None:
    """Ends and copies are where the timetable has them."""
    ranks = 4
    timetable = made(name, ranks, 12, EQUAL)
    firsts = {timetable.placement[s] for s in range(timetable.stages) if s % timetable.length == 0}
    lasts = {timetable.placement[s] for s in range(timetable.stages) if (s + 1) % timetable.length == 0}
    assert (firsts, lasts) == tuple(set(rows) for rows in ends(name, ranks))
    assert timetable.chains == copies(name)
    assert timetable.length == ranks * chunks(name)


def what_is_served(name: str) -> None:
    """Sizes that are served are those whose timetable can be made."""
    for ranks, micros in SIZES:
        refused = False
        try:
            SCHEDULES.read(name).timetable(ranks, micros)
        except Exception:
            refused = True
        assert refused is not serves(name, ranks, micros, LAYERS), (ranks, micros)
    assert not serves(name, 4, 12, 3)


def test_dualpipev_has_the_weights_once_and_half_a_micro_batch_more() -> None:
    assert copies("dualpipev") == 1.0
    assert in_flight("dualpipev", 0, 4, 16) == 4.5
    assert idle("dualpipev", 4, 16, 2.0, 4.0, 2.0) == 3 * (3.0 + 2.0 - 3.0)


def arrays(name: str) -> None:
    """Arrays have the prices of their numbers."""
    np = pytest.importorskip("numpy")
    micros, forward = np.array([8.0, 12.0, 24.0])[:, None], np.array([1.0, 2.0])
    got = idle(name, 4, micros, forward, 3 * forward, forward)
    held = in_flight(name, 1, 4, micros)
    for i, j in product(range(3), range(2)):
        m, f = float(micros[i, 0]), float(forward[j])
        one = idle(name, 4, m, f, 3 * f, f)
        assert np.broadcast_to(got, (3, 2))[i, j] == pytest.approx(one)
        assert held[i, 0] == in_flight(name, 1, 4, m)


def test_the_larger_the_smaller_and_either() -> None:
    np = pytest.importorskip("numpy")
    a, b = np.array([1.0, 4.0]), np.array([2.0, 3.0])
    assert larger(a, b).tolist() == [2.0, 4.0] and smaller(a, b).tolist() == [1.0, 3.0]  # type: ignore[attr-defined]
    assert either(a > b, a, b).tolist() == [2.0, 4.0]  # type: ignore[attr-defined]
    assert (larger(1, 2.0), smaller(1, 2.0), either(False, 1.0, 2.0)) == (2.0, 1, 2.0)

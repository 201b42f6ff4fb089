"""Which algorithm for which size: what was measured, as words of a plan and back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.programs.collectives import pick, ring, tree
from unisono.programs.collectives.pick import Pick
from unisono.programs.collectives.price import alike

NAMES = st.sampled_from(["direct", "ring", "tree", "double_tree"])
TIMES = st.dictionaries(
    st.integers(1, 1 << 24),
    st.fixed_dictionaries(
        {"engine": st.floats(1e-4, 1.0), "ring": st.floats(1e-4, 1.0), "tree": st.floats(1e-4, 1.0)}
    ),
    max_size=5,
)


@given(st.dictionaries(st.integers(1, 1 << 30), NAMES, max_size=5))
def test_words_give_back_what_was_picked(sizes) -> None:
    picks = tuple(Pick(name, most) for most, name in sorted(sizes.items()))
    assert pick.read(pick.written(picks)) == picks


@pytest.mark.parametrize(
    "text", ["direct", "direct-0", "direct-64KiB", "ring-10/direct-10", "ring-10/tree-9", "-5"]
)
def test_words_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r"direct-65536|rise"):
        pick.read(text)


def test_beyond_what_was_measured_the_engine_sums() -> None:
    picks = pick.read("direct-4096/engine-16384/ring-65536")
    assert [pick.of(picks, n) for n in (0, 4096, 4097, 16385, 65536, 65537)] == [
        "direct", "direct", "engine", "ring", "ring", "engine"
    ]  # fmt: skip
    assert pick.of((), 1) == "engine"


@given(TIMES, st.floats(0.0, 0.5))
def test_another_one_is_taken_where_it_is_quicker_by_the_margin_and_nowhere_else(times, margin) -> None:
    picks = pick.picked(times, margin)
    for nbytes, each in times.items():
        name = pick.of(picks, nbytes)
        best = min(each.values())
        assert each[name] == best or name == "engine"
        assert (name != "engine") == (best < (1.0 - margin) * each["engine"])
    assert not picks or picks[-1].name != "engine"
    assert all(a.name != b.name for a, b in itertools.pairwise(picks))


def test_few_rounds_are_cheap_for_little_and_few_bytes_for_much() -> None:
    links = alike(1e-3, 1e8)
    programs = {"tree": lambda: tree.program("all_reduce", 8), "ring": lambda: ring.program("all_reduce", 8)}
    assert [pick.cheapest(programs, n, links) for n in (1000, 100_000_000)] == ["tree", "ring"]

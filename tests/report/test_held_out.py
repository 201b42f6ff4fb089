"""The cases that judge the verdict's rules: drawn by a seed, of all kinds, and none of those on which rules were chosen."""

from dataclasses import replace

from benchmarks.verdict_cases import CHOSEN, SEED, Planted, held_out

EVERY = ("planted", "healthy", "ambiguous")


def cases(seed: int) -> list[Planted]:
    drawn = held_out(seed)
    return [case for group in EVERY for case in getattr(drawn, group)]


def test_a_seed_draws_the_same_cases_and_another_others() -> None:
    assert cases(SEED) == cases(SEED)
    alike = [a.name for a, b in zip(cases(SEED), cases(SEED + 1), strict=True) if a == b]
    assert not alike


def test_they_are_of_the_same_kinds_and_none_is_a_chosen_one() -> None:
    drawn = held_out()
    assert [(case.name, case.causes) for case in drawn.planted] == [
        (c.name, c.causes) for c in CHOSEN.planted
    ]
    assert (len(drawn.healthy), len(drawn.ambiguous)) == (4, 4)
    chosen = [replace(case, name="") for group in EVERY for case in getattr(CHOSEN, group)]
    assert not [case for case in cases(SEED) if replace(case, name="") in chosen]

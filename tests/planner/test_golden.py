"""Prices and verdicts are what they were, but for what is listed with a reason."""

import pytest

from tests.golden.planner.questions import CLOSE, answer, differs, frozen, intended, rounded

QUICK = 400


def _moved(texts: list[str]) -> list[str]:
    prices = frozen()
    return [text for text in texts if differs(prices[text], rounded(answer(text)))]


def test_every_sixth_price_is_the_frozen_one() -> None:
    texts = [*frozen()]
    assert len(texts) >= 1500
    assert _moved(texts[:: len(texts) // QUICK]) == []


@pytest.mark.slow
def test_every_price_is_the_frozen_one() -> None:
    assert _moved([*frozen()]) == []


def test_what_was_frozen_anew_has_a_reason_and_excuses_nothing_more() -> None:
    assert intended() == []
    for pattern, why in intended(settled=True):
        assert len(why) > 20, pattern


def test_a_moved_price_is_seen() -> None:
    was = ["fits", 1.0, 2.0]
    assert (
        differs(was, ["short", 1.0, 2.0])
        and differs(was, ["fits", 1.0 + 2 * CLOSE, 2.0])
        and not differs(was, was)
    )

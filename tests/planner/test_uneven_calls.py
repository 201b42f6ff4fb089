"""Degrees of tp that divide neither positions nor keys: what is filled up, and what is lent, is sent and listed."""

import pytest

from tests.planner.test_calls import held
from unisono.plan import Plan


@pytest.mark.parametrize("text", ["tp=5 recompute=full", "tp=4"])
def test_what_is_listed_is_what_is_sent(text: str) -> None:
    held("llama", Plan.parse(text))

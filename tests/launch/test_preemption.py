"""Runs that are asked to end at random moments; see `preemption`, which tries it more often."""

import random
from pathlib import Path

import pytest

from tests.launch.preemption import tries


@pytest.mark.timeout(400)
def test_two_runs_that_are_asked_to_end_go_on_to_the_same_bits(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # with which `python -m tests.launch.preemption --forked --seed` does it again
    assert tries(2, seed, False, tmp_path) == 2

"""examples/moe.toml: the same losses however its experts are dealt, and experts that are alike in load."""

import pytest

from benchmarks.experts import busiest, losses


@pytest.mark.slow
def test_losses_are_the_same_however_experts_are_dealt() -> None:
    one, *others = losses().values()
    for other in others:
        assert other == pytest.approx(one, rel=1e-13)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_votes_keep_the_busiest_expert_below_one_and_a_half_of_the_mean() -> None:
    loads = busiest(0.002)
    print("tokens of the busiest expert over the mean, after 300 steps:", *(f"{load:.2f}" for load in loads))
    assert max(loads) < 1.5

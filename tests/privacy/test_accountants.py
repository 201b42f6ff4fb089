"""Both accountants against published values, closed forms and the libraries of others; bounds and order relations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.spec.errors import UsageError
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.noise import Accountant, noise_for
from unisono_contrib.privacy.prv import prv_epsilon
from unisono_contrib.privacy.rdp import divergences, rdp_epsilon

BOTH = [rdp_epsilon, prv_epsilon]
CASES = [(1.5, 0.04, 2250), (1.0, 0.01, 500), (0.6, 0.001, 300), (4.0, 0.5, 100), (2.0, 1.0, 20)]


def spent(*steps: tuple[float, float, int]) -> list[SampledGaussian]:
    return [SampledGaussian(*each) for each in steps]


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Of one Gaussian mechanism without sampling, exactly (Balle and Wang 2018)."""
    below = lambda z: 0.5 * math.erfc(-z / math.sqrt(2.0))
    a, b = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
    return below(a) - math.exp(epsilon) * below(b)


def test_published_values() -> None:
    """Of Opacus' own tests: its Rényi one takes 2,250 steps, its other one 90 // 0.04, which is 2,249."""
    assert rdp_epsilon(spent((1.5, 0.04, 2250)), 1e-5) == pytest.approx(7.32911117143, abs=1e-6)
    assert prv_epsilon(spent((1.5, 0.04, 2249)), 1e-5) == pytest.approx(6.777395712, abs=1e-5)
    assert noise_for(8.0, 1e-5, 0.04, 2000, rdp_epsilon) == pytest.approx(1.3562, abs=1e-3)


def test_published_noise_of_the_tight_accountant() -> None:
    assert noise_for(8.0, 1e-5, 0.04, 2000, tolerance=1e-3) == pytest.approx(1.2915, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_opacus_says_the_same(case: tuple[float, float, int]) -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="Opacus, an oracle, is not installed")
    for kind, ours in (("RDPAccountant", rdp_epsilon), ("PRVAccountant", prv_epsilon)):
        theirs = getattr(accountants, kind)()
        theirs.history = [case]
        assert ours(spent(case), 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=2e-4), kind


@pytest.mark.parametrize("case", CASES)
def test_google_says_the_same(case: tuple[float, float, int]) -> None:
    pld = pytest.importorskip(
        "dp_accounting.pld.privacy_loss_distribution", reason="dp-accounting, an oracle, is not installed"
    )
    noise, rate, steps = case
    theirs = pld.from_gaussian_mechanism(noise, sampling_prob=rate).self_compose(steps)
    epsilon = theirs.get_epsilon_for_delta(1e-5)
    assert -1e-3 <= prv_epsilon(spent(case), 1e-5) - epsilon <= 0.02


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_one_gaussian_is_exact(noise: float) -> None:
    epsilon = prv_epsilon(spent((noise, 1.0, 1)), 1e-5, error=1e-3)
    assert gaussian_delta(epsilon, noise) <= 1e-5 <= gaussian_delta(epsilon - 4e-3 - epsilon / 500.0, noise)


@pytest.mark.parametrize("epsilon_of", BOTH)
def test_steps_of_one_gaussian_are_one_with_less_noise(epsilon_of: Accountant) -> None:
    """16 steps with noise 4 are one with noise 1."""
    many, single = epsilon_of(spent((4.0, 1.0, 16)), 1e-6), epsilon_of(spent((1.0, 1.0, 1)), 1e-6)
    assert many == pytest.approx(single, abs=2e-3)


def test_divergences_without_sampling_have_a_closed_form() -> None:
    orders = (1.5, 2.0, 7.3, 64.0)
    assert np.allclose(divergences(1.3, 1.0, orders), [a / (2.0 * 1.3**2) for a in orders], rtol=1e-10)


@pytest.mark.parametrize("order", [2, 3, 8])
def test_divergences_of_whole_orders_are_a_sum(order: int) -> None:
    """Mironov et al. (2019), equation 4."""
    noise, rate = 0.9, 0.03
    terms = [
        math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp((k * k - k) / (2 * noise**2))
        for k in range(order + 1)
    ]
    expected = math.log(math.fsum(terms)) / (order - 1)
    assert divergences(noise, rate, (float(order),))[0] == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    noise=st.floats(0.4, 8.0),
    rate=st.floats(1e-4, 0.3),
    steps=st.integers(1, 400),
    delta=st.floats(1e-8, 1e-3),
)
def test_tight_is_below_quick_and_never_negative(noise: float, rate: float, steps: int, delta: float) -> None:
    history = spent((noise, rate, steps))
    tight, quick = prv_epsilon(history, delta), rdp_epsilon(history, delta)
    assert 0.0 <= tight <= quick + 2.0 * max(0.01, quick / 500.0)


@pytest.mark.parametrize("epsilon_of", BOTH)
def test_more_steps_and_less_noise_reveal_more(epsilon_of: Accountant) -> None:
    usual = epsilon_of(spent((1.0, 0.02, 200)), 1e-5)
    assert epsilon_of(spent((1.0, 0.02, 400)), 1e-5) > usual
    assert epsilon_of(spent((0.8, 0.02, 200)), 1e-5) > usual
    assert epsilon_of(spent((1.0, 0.04, 200)), 1e-5) > usual
    assert epsilon_of(spent((1.0, 0.02, 200)), 1e-7) > usual


@pytest.mark.parametrize("epsilon_of", BOTH)
def test_a_history_may_be_cut_anywhere(epsilon_of: Accountant) -> None:
    whole = epsilon_of(spent((1.0, 0.02, 300), (0.7, 0.01, 50)), 1e-5)
    parts = epsilon_of(spent((1.0, 0.02, 100), (0.7, 0.01, 50), (1.0, 0.02, 200)), 1e-5)
    assert whole == pytest.approx(parts, abs=1e-6)


@pytest.mark.parametrize("epsilon_of", BOTH)
def test_the_edges(epsilon_of: Accountant) -> None:
    assert epsilon_of([], 1e-5) == 0.0
    assert epsilon_of(spent((1.0, 0.0, 10), (0.0, 0.5, 0)), 1e-5) == 0.0
    assert epsilon_of(spent((0.0, 0.1, 1)), 1e-5) == math.inf
    assert 0.0 <= epsilon_of(spent((100.0, 1e-3, 1)), 1e-3) <= 0.02
    assert 0.0 <= epsilon_of(spent((1e4, 1.0, 1)), 0.1) <= 0.02


def test_a_large_epsilon_has_a_value() -> None:
    """Opacus' accountant fails here, or fills the memory."""
    history = spent((0.3, 0.04, 2000))
    assert 300.0 < prv_epsilon(history, 1e-5) < rdp_epsilon(history, 1e-5) < 400.0


@pytest.mark.parametrize("budget", [(1.0, 1e-5, 0.02, 300), (20.0, 1e-6, 0.1, 50)])
def test_the_noise_of_a_budget_is_enough_and_hardly_more(budget: tuple[float, float, float, int]) -> None:
    epsilon, delta, rate, steps = budget
    noise = noise_for(*budget, rdp_epsilon)
    assert rdp_epsilon(spent((noise, rate, steps)), delta) <= epsilon
    assert rdp_epsilon(spent((noise - 3e-4, rate, steps)), delta) > epsilon


@pytest.mark.parametrize(
    "history", [(-1.0, 0.1, 1), (math.nan, 0.1, 1), (1.0, 1.5, 1), (1.0, -0.1, 1), (1.0, 0.1, -1)]
)
def test_what_is_no_mechanism_is_refused(history: tuple[float, float, int]) -> None:
    with pytest.raises(UsageError, match="mechanism with"):
        SampledGaussian(*history)


@pytest.mark.parametrize("epsilon_of", BOTH)
@pytest.mark.parametrize("delta", [0.0, 1.0, 1e-20, math.nan])
def test_a_delta_that_is_none_is_refused(epsilon_of: Accountant, delta: float) -> None:
    with pytest.raises(UsageError, match="delta is"):
        epsilon_of(spent((1.0, 0.1, 1)), delta)


def test_a_budget_below_all_noise_is_refused() -> None:
    never: Accountant = lambda history, delta: 1.0
    with pytest.raises(UsageError, match="no noise keeps"):
        noise_for(0.5, 1e-5, 0.1, 1, never)

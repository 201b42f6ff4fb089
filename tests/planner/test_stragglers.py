"""Expected waiting for the slowest against seeded sampling and closed forms."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from unisono.spec.errors import UsageError
from unisono_contrib.planner import stragglers as st

LAWS = ("normal:0.1", "lognormal:0.3", "exponential:0.2")


def drawn(text: str, shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    kind, _, spread = text.partition(":")
    sd, chance = float(spread), np.random.default_rng(seed)
    if kind == "normal":
        return chance.normal(1.0, sd, shape)
    if kind == "exponential":
        return 1.0 - sd + chance.exponential(sd, shape)
    sigma = math.sqrt(math.log1p(sd * sd))
    return chance.lognormal(-sigma * sigma / 2, sigma, shape)


@pytest.mark.parametrize("text", LAWS)
@pytest.mark.parametrize("n", [1, 8, 200])
def test_the_slowest_takes_what_samples_say(text: str, n: int) -> None:
    slowest = drawn(text, (400_000 // n, n)).max(axis=1)
    error = slowest.std() / math.sqrt(len(slowest))
    assert st.law(text).slowest(n) == pytest.approx(slowest.mean(), abs=5 * error)


def test_means_are_exact_where_a_closed_form_is_known() -> None:
    # The slowest of n exponentials: the harmonic sum (Renyi, 1953); normal: tables of Harter, 1961.
    for n in (1, 2, 64, 16_384):
        harmonic = sum(1.0 / i for i in range(1, n + 1))
        assert st.law("exponential:0.5").slowest(n) == pytest.approx(0.5 + 0.5 * harmonic, rel=1e-6)
    assert st.law("normal:1.0").slowest(2) - 1.0 == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert st.law("normal:1.0").slowest(10) - 1.0 == pytest.approx(1.53875, abs=1e-5)
    assert st.law("lognormal:0.4").slowest(1) == pytest.approx(1.0, rel=1e-9)


def test_measured_steps_are_a_law(tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "steps.txt"
    times = [0.2 * chance.lognormvariate(0.0, 0.1) for _ in range(2000)]
    path.write_text("\n".join(map(str, times)))
    of = st.law(f"measured:{path}")
    assert of.slowest(1) == pytest.approx(1.0, rel=1e-3)
    mean = sum(times) / len(times)
    sampled = sum(max(chance.choices(times, k=32)) for _ in range(4000)) / 4000 / mean
    assert of.slowest(32) == pytest.approx(sampled, rel=5e-3)


@pytest.mark.parametrize(
    "text", ["normal", "norml:0.1", "normal:x", "exponential:2", "measured:/no/such/file"]
)
def test_mistakes_have_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        st.law(text)
    assert caught.value.fix

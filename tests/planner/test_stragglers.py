"""Expected waiting against seeded sampling, orders between policies, and a server that saturates where it must."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from unisono.planner import stragglers as st
from unisono.planner.studies import waiting
from unisono.spec.errors import UsageError

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


def step(text: str, sync: str, replicas: int, inner: int = 1) -> float:
    return st.pace(st.law(text), sync, replicas, inner).step


@pytest.mark.parametrize("text", LAWS)
@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 6), (200, 200), (200, 190), (200, 3)])
def test_a_quorum_takes_what_samples_say(text: str, n: int, k: int) -> None:
    rows = 200_000 // n
    sampled = np.partition(drawn(text, (rows, n)), k - 1, axis=1)[:, k - 1]
    error = sampled.std() / math.sqrt(min(rows, 4000))
    assert step(text, f"quorum:k={k}", n) == pytest.approx(sampled.mean(), abs=5 * error + 1e-3)


def test_means_are_exact_where_a_closed_form_is_known() -> None:
    # The slowest of n exponentials: the harmonic sum (Renyi, 1953); normal: tables of Harter, 1961.
    for n in (1, 2, 64, 16_384):
        harmonic = sum(1.0 / i for i in range(1, n + 1))
        assert step("exponential:0.5", "every_step", n) == pytest.approx(0.5 + 0.5 * harmonic, rel=1e-6)
    assert step("normal:1.0", "every_step", 2) - 1.0 == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert step("normal:1.0", "every_step", 10) - 1.0 == pytest.approx(1.53875, abs=1e-5)
    assert step("lognormal:0.4", "async", 8) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("text", LAWS)
@pytest.mark.parametrize("h", [2, 16, 100])
def test_waiting_every_h_steps_is_that_of_samples(text: str, h: int) -> None:
    n, rows = 16, 4_000_000 // 16 // h
    sampled = drawn(text, (rows, n, h)).mean(axis=2).max(axis=1)
    error = sampled.std() / math.sqrt(min(rows, 3600 // h))
    assert step(text, f"local_sgd:h={h}", n) == pytest.approx(sampled.mean(), abs=5 * error + 1e-3)


def test_the_slowest_of_slowest() -> None:
    of = st.law("lognormal:0.2")
    assert st.mean(of.slowest_of(8).slowest_of(16)) == pytest.approx(st.mean(of.slowest_of(128)), rel=1e-9)
    for text in LAWS:
        assert step(text, "async", 16, 64) == pytest.approx(step(text, "every_step", 64), rel=1e-9)


@pytest.mark.parametrize("text", LAWS)
def test_policies_wait_in_order(text: str) -> None:
    """Tighter policies wait longer: every step, bounded staleness, no bound; local steps between; spares help."""
    of, n = st.law(text), 32
    every = st.pace(of, "every_step", n, 1).step
    assert st.pace(of, "canonical", n, 1).step == every
    steps = [st.pace(of, f"ssp:s={s}", n, 1).step for s in (0, 1, 4, 16)]
    assert steps[0] == pytest.approx(every, rel=0.01)
    assert steps == sorted(steps, reverse=True)
    free = st.pace(of, "async", n, 1).step
    assert free == pytest.approx(1.0, abs=1e-6) and steps[-1] > 0.99
    local = st.pace(of, "local_sgd:h=5", n, 1).step
    assert free < local < every
    # Nobody may run further ahead under a barrier every 5 steps than under a staleness of 4.
    assert steps[2] < local * 1.01
    assert steps[1] == st.pace(of, "delayed", n, 1).step
    spare = st.pace(of, "quorum:k=28", n, 1)
    assert spare.step < every and spare.counted == 28 / 32
    assert free < st.pace(of, "gossip", n, 1).step < every


def test_measured_steps_are_a_law(tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "steps.txt"
    times = [0.2 * chance.lognormvariate(0.0, 0.1) for _ in range(2000)]
    path.write_text("\n".join(map(str, times)))
    of = st.law(f"measured:{path}")
    assert st.mean(of) == pytest.approx(1.0, rel=1e-3)
    mean = sum(times) / len(times)
    sampled = sum(max(chance.choices(times, k=32)) for _ in range(4000)) / 4000 / mean
    assert st.mean(of.slowest_of(32)) == pytest.approx(sampled, rel=5e-3)


@pytest.mark.parametrize(
    "text", ["normal", "norml:0.1", "normal:x", "exponential:2", "measured:/no/such/file"]
)
def test_mistakes_have_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        st.law(text)
    assert caught.value.fix
    with pytest.raises(UsageError):
        st.pace(st.law("normal:0.1"), "quorum:k=9", 8, 1)


def played_server(compute: float, serve: float, workers: int, seconds: float) -> float:
    chance = random.Random(2)
    arrivals = sorted((chance.expovariate(1 / compute), w) for w in range(workers))
    free, done = 0.0, 0
    while arrivals[0][0] < seconds:
        when, worker = arrivals.pop(0)
        free = max(free, when) + chance.expovariate(1 / serve)
        done += 1
        again = free + chance.expovariate(1 / compute)
        at = next((i for i, one in enumerate(arrivals) if one[0] > again), len(arrivals))
        arrivals.insert(at, (again, worker))
    return done / seconds


def test_a_parameter_server_saturates_where_the_bounds_cross() -> None:
    compute, serve = 1.0, 0.1
    at = waiting.breaks_at(compute, serve)
    assert at == pytest.approx(11.0)
    curve = waiting.server(compute, serve, (1, 4, 11, 32, 128))
    for one in curve:
        assert one.rate <= min(one.ideal, 1.0 / serve) * (1 + 1e-12)
        assert one.rate == pytest.approx(played_server(compute, serve, one.workers, 3000.0), rel=0.04)
    assert curve[0].rate == pytest.approx(1 / 1.1)
    assert curve[-1].rate == pytest.approx(10.0, rel=1e-6) and curve[-1].busy == pytest.approx(1.0)
    assert curve[1].rate > 0.9 * curve[1].ideal and curve[3].rate < 0.4 * curve[3].ideal

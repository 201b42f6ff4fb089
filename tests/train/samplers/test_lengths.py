"""A real run with samplers learns from sequences of the lengths that were drawn, and the test that says so can fail."""

import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.verbs.jobs import started, unisono
from unisono_contrib.report.lengths import distance

pytestmark = pytest.mark.timeout(240)

RECIPE = """
name = "sums"
[model]
kind = "gpt"
n_layer = 1
n_head = 2
d_model = 32
context = 16
positions = "rotary"
[data]
source = "sums:2"
packing = "none"
[post]
kind = "grpo"
group = 4
max_new_tokens = 8
max_staleness = 2
samplers = 2
sft_steps = 40
temperature = 1.5
reward = "reward.py:score"
[train]
steps = 60
global_batch = 64
micro_batch = 8
lr = 1e-2
[launch]
threads_per_rank = 1
[out]
report = false
"""

REWARD = """
def score(prompt, drawn, answer):
    return len(drawn) % 3 / 2
"""

DROPS = """
from unisono_contrib.train.post import work

usual = work.Drawing._trained


def dropping(self, run, batch, leaves):
    built = usual(self, run, batch, leaves)
    for leaf in built:
        leaf.targets[leaf.counted.to(leaf.targets.device) > 5] = -100  # they came late
    return built


work.Drawing._trained = dropping
"""


def lengths_of(folder: Path, done: Any) -> dict[str, Any]:
    """What `unisono report --json` says of a run's lengths."""
    assert done.code == 0 and done.left == (), done.err
    return unisono(folder, "report", done.object["run_dir"], "--json").object["lengths"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", DROPS], ids=["whole", "dropping"])
def test_trained_lengths_are_those_that_samplers_drew(tmp_path: Path, bug: str) -> None:
    """20 steps of 64 sequences, up to 2 updates old: all of them are trained, unless long ones are thrown away."""
    (tmp_path / "sums.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(bug + REWARD)
    lengths = lengths_of(tmp_path, unisono(tmp_path, "train", "sums.toml", "--json", "--plan", "dp=2"))
    drawn = {int(length): count for length, count in lengths["drawn"].items()}
    assert sum(drawn.values()) == 20 * 64 and len(drawn) >= 6 and lengths["again"] == lengths["ahead"] == 0
    lost = sum(count for length, count in drawn.items() if length > 5) if bug else 0
    assert lengths["lost"] == lost and lengths["alike"] is not bool(bug), lengths["says"]
    assert (lengths["drawn"] == lengths["trained"]) is not bool(bug) and (lost > 0) is bool(bug)


@pytest.mark.slow
def test_a_stopped_run_has_drawn_no_more_than_the_bound_admits(tmp_path: Path) -> None:
    """What was under way is counted, and drawn anew when the run goes on."""
    (tmp_path / "sums.toml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(REWARD)
    with started(
        tmp_path, "train", "sums.toml", "--json", "--plan", "dp=1", "--train.save_every", "5"
    ) as job:
        run = job.steps(45)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.done().code in (75, 143)
    lengths = unisono(tmp_path, "report", str(run), "--json").object["lengths"]
    assert lengths["lost"] == 0 and 0 < lengths["ahead"] <= 3 * 64, lengths["says"]
    after = lengths_of(tmp_path, unisono(tmp_path, "train", "--resume", str(run), "--json"))
    assert after["lost"] == after["ahead"] == 0 and after["again"] > 0, after["says"]
    assert after["drawn"] == after["trained"] and after["alike"]


def test_the_statistic_is_that_of_two_distribution_functions() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.poisson(4.0, 900), rng.poisson(4.4, 700)
    at = np.arange(20)
    shares = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (first, second)]
    statistic, limit = distance(Counter(first.tolist()), Counter(second.tolist()))
    assert math.isclose(statistic, np.abs(shares[0] - shares[1]).max())
    # Of many pairs from one distribution next to none is above the limit.
    pairs = (Counter(rng.poisson(4.0, 900).tolist()) for _ in range(400))
    over = [distance(a, b)[0] > limit for a, b in zip(pairs, pairs, strict=True)]
    assert sum(over) <= 2 and distance({1: 9}, {})[1] == math.inf

"""Every split, aggregate and strategy passes its suite; and the suites find members that are wrong."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from unisono.spec.family import Member
from unisono_contrib.federated.strategies.fedavg import FedAvg
from unisono_contrib.federated.strategies.fedprox import FedProx
from unisono_contrib.spec.federated import AGGREGATES, SPLITS, STRATEGIES, Aggregate, Equals, SampleSplit
from unisono_contrib.verify.conformance import aggregate, held, split, strategy, word_of

FAMILIES: tuple[Any, ...] = (SPLITS, AGGREGATES, STRATEGIES)
NAMES = [f"{word_of(family)}={name}" for family in FAMILIES for name in family.names()]


@pytest.mark.parametrize("name", NAMES)
def test_every_member_passes_its_suite(name: str, tmp_path: Path) -> None:
    assert held(name, tmp_path).faults == ()


class Unweighted(Aggregate):
    """Each client counts as much as any other."""

    name = "unweighted"
    linear = True

    def combine(self, deltas, weights):
        return deltas.mean(0)


class InPlace(Aggregate):
    """The mean, which spoils what it is given."""

    name = "in_place"

    def combine(self, deltas, weights):
        return deltas.mul_((weights / weights.sum())[:, None]).sum(0)


class Loses(SampleSplit):
    """Cuts off what does not fill a part."""

    name = "loses"

    def assign(self, samples, classes, clients, seed):
        import numpy as np

        order = np.random.RandomState(seed).permutation(samples).astype(np.int64)
        return [np.sort(part) for part in order[: samples - 3].reshape(-1)[:594].reshape(6, 99)]


class Unkept(FedAvg):
    """Momentum in a place that no checkpoint knows."""

    name = "unkept"

    def step(self, delta, kept):
        state = vars(self).setdefault("velocity", delta * 0.0)
        return state.mul_(0.9).add_(delta).clone()


class PulledAlways(FedProx):
    """Says that it is FedAvg with mu 0, and is not."""

    name = "pulled"
    equals: ClassVar[Equals] = ((f"{__file__}:PulledAlways:mu=0", "fedavg"),)

    def pull(self, weights, start, sent, kept):
        return (self.mu + 0.1) * (weights - start)


@pytest.mark.parametrize(
    "suite,member,words",
    [
        (aggregate, Unweighted(), "not the mean of deltas by weight"),
        (aggregate, InPlace(), "changes the deltas"),
        (split, Loses(), "not each sample is with exactly one client"),
        (strategy, Unkept(), "depends on more than the delta and what is kept"),
        (strategy, PulledAlways(), "from fedavg"),
    ],
    ids=lambda x: x.name if isinstance(x, Member) else "",
)
def test_what_is_wrong_is_seen(suite, member: Member, words: str, tmp_path: Path) -> None:
    assert any(words in fault for fault in suite.faults(member, tmp_path))

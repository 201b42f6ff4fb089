"""Every sample is with exactly one client, the same one on any machine."""

import numpy as np
import pytest

from unisono.spec.errors import UsageError
from unisono_contrib.spec.federated import SPLITS

CLASSES = np.arange(1600, dtype=np.int64) * 7 % 10


@pytest.mark.parametrize("text", ["iid", "dirichlet:alpha=0.3", "dirichlet:alpha=100", "shards:2"])
@pytest.mark.parametrize("clients", [1, 7, 50])
def test_each_sample_has_one_client(text: str, clients: int) -> None:
    parts = SPLITS.read(text).assign(len(CLASSES), CLASSES, clients, seed=3)
    assert len(parts) == clients and min(map(len, parts)) > 0
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(CLASSES)))
    again = SPLITS.read(text).assign(len(CLASSES), CLASSES, clients, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if clients > 1:
        other = SPLITS.read(text).assign(len(CLASSES), CLASSES, clients, seed=4)
        assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_a_small_alpha_gives_few_classes_and_a_large_one_all() -> None:
    def most(text: str) -> float:
        """The mean share of a client's commonest class."""
        parts = SPLITS.read(text).assign(len(CLASSES), CLASSES, 20, seed=0)
        return float(np.mean([np.bincount(CLASSES[part]).max() / len(part) for part in parts]))

    assert most("dirichlet:alpha=100") < 0.2 < 0.4 < most("dirichlet:alpha=0.1")
    assert most("shards:2") > 0.4 and most("iid") < 0.25


def test_the_split_of_a_seed_is_fixed_for_good() -> None:
    """Golden: another order would give everybody's clients other samples."""
    assert SPLITS.read("iid").assign(100, None, 10, seed=0)[3].tolist() == GOLDEN_IID
    assert (
        SPLITS.read("dirichlet:alpha=0.3").assign(1600, CLASSES, 50, seed=0)[3].tolist()[:5]
        == GOLDEN_DIRICHLET
    )


GOLDEN_IID = [2, 19, 28, 40, 56, 78, 79, 81, 84, 92]
GOLDEN_DIRICHLET = [77, 107, 115, 147, 180]


def test_a_client_without_samples_is_refused_where_each_must_have_some() -> None:
    with pytest.raises(UsageError, match="none left each client"):
        SPLITS.read("dirichlet:alpha=0.01,least=33").assign(160, CLASSES[:160], 5, seed=0)

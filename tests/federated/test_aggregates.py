"""What aggregates make of deltas."""

import torch

from unisono_contrib.spec.federated import AGGREGATES


def test_the_mean_is_by_weight_and_not_by_client() -> None:
    deltas = torch.tensor([[1.0, 0.0], [4.0, 8.0]], dtype=torch.float64)
    weights = torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert AGGREGATES.read("mean").combine(deltas, weights).tolist() == [1.75, 2.0]

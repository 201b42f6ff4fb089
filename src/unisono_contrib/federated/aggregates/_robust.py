"""What the robust aggregates share: how many clients they need, and which deltas lie near each other."""

import torch
from torch import Tensor

from unisono.spec.errors import UsageError


def require_clients(name: str, clients: int, attackers: int, least: int, rule: str) -> None:
    """Raises UsageError C06 unless there are at least `least` clients; both numbers are named. rule: the condition."""
    if clients < least:
        raise UsageError(
            f"{name} with attackers={attackers} needs {rule} = {least} clients in a round, and there are {clients}",
            where="federated.aggregate",
            likely="with fewer, attackers could outvote the honest clients, and nobody would notice",
            fix=f"at least {least} clients in a round, or fewer attackers",
            code="C06",
        )


def squared_distances(deltas: Tensor) -> Tensor:
    """float64 [n, n] between all rows of deltas [n, d]; inf where a delta has a number that is none.

    By differences in float64. The expansion x² + y² - 2xy cancels where updates are small, and its rounding then
    decides who is near."""
    rows = deltas.double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    return distances.nan_to_num(nan=torch.inf, posinf=torch.inf)


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """float64 [n]: the sum of the squared distances of each row to its n - attackers - 2 nearest others, at least one
    of them (Blanchard et al. 2017). A low one means many neighbours. distances: [n, n]."""
    n = len(distances)
    nearest = (
        distances.masked_fill(torch.eye(n, dtype=torch.bool, device=distances.device), torch.inf)
        .sort(1)
        .values
    )
    return nearest[:, : max(1, n - attackers - 2)].sum(1)


def middle(columns: Tensor) -> Tensor:
    """The median of each column of columns [n, d], [d]: of an even number, the mean of the two in the middle. What is
    not a number counts as above all numbers."""
    n = len(columns)
    ordered = columns.sort(0).values
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2.0

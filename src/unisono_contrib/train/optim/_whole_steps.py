"""Live optimisers whose step needs a whole matrix, which ranks may hold in parts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono_contrib.train.optim._matrices import product_cost
from unisono_contrib.train.step.owners import Owners


def gradient(p: nn.Parameter) -> Tensor:
    """The gradient of a parameter that has one."""
    if p.grad is None:
        raise ValueError("a parameter without a gradient is not stepped")
    return p.grad


class WholeSteps(Optimizer):
    """Steps matrices. The owner of each computes its direction; all ranks go along theirs, each with its part.

    owners: who computes which; None: every matrix is whole here, and this rank computes all. owned: matrices whose
    state lies with their owner alone, each with whether no other replica has it.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.owners: Owners | None = None
        self.owned: dict[nn.Parameter, bool] = {}

    def cost(self, shape: Sequence[int]) -> float:
        """Of one matrix' direction, to compare matrices; `Optimiser.matrix_work` says the same."""
        return product_cost(shape)

    def share(self, owners: Owners, over_dp: bool) -> None:
        """Let `owners` say who computes which matrix. over_dp: whether they are of several replicas."""
        self.owners = owners if owners.group.size > 1 else None

    @abstractmethod
    def send(self, p: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """What of this rank's part the owner has to know: here the momentum is brought up to date, where parts of it
        suffice for that."""

    @abstractmethod
    def direction(self, p: nn.Parameter, whole: Tensor, group: Mapping[str, Any]) -> Tensor:
        """[m, n], of what was sent, whole [m, n]. It is called once for each matrix and update, by its owner."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        groups = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        sent = {p: self.send(p, group) for p, group in groups.items()}
        if not sent:
            return
        wholes = sent if self.owners is None else self.owners.gather(sent)
        moves = {p: self.direction(p, whole, groups[p]) for p, whole in wholes.items()}
        parts = moves if self.owners is None else self.owners.scatter(moves, sent)
        for p, group in groups.items():
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(parts[p], alpha=-group["lr"] * self.scale(self._shape(p)))

    def _shape(self, p: nn.Parameter) -> Sequence[int]:
        return p.shape if self.owners is None else self.owners.matrices[p].shape

    def scale(self, shape: Sequence[int]) -> float:
        """By what the direction of a whole matrix of this shape is multiplied."""
        return 1.0

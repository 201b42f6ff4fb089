"""How far probabilities are to be believed, of one model and of several whose probabilities are averaged.

NLL: nats per target. ECE: expected calibration error (Guo et al., On calibration of modern neural networks, 2017), the
mean distance of confidence from accuracy over 15 equal bins of confidence. An ensemble's probabilities are the mean of
its members' (Lakshminarayanan et al., Simple and scalable predictive uncertainty estimation, 2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.spec.training import IGNORED

BINS = 15


@dataclass
class Calibration:
    """Sums over all targets so far. bins [BINS, 3]: targets, confidence, and hits of each bin of confidence."""

    nll: float = 0.0
    bins: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))

    def add(self, probs: Tensor, targets: Tensor) -> None:
        """probs [n, classes] in float64, targets [n]; all count."""
        tiny = torch.finfo(probs.dtype).tiny
        self.nll -= float(probs.gather(1, targets[:, None]).clamp_min(tiny).log().sum())
        confidence, likeliest = probs.max(1)
        hits = (likeliest == targets).double()
        at = (confidence * BINS).long().clamp_max(BINS - 1)
        self.bins.index_add_(0, at, torch.stack([torch.ones_like(hits), confidence, hits], 1))

    def as_dict(self) -> dict[str, float]:
        """{"nll", "accuracy", "ece"}; of no targets at all, none."""
        count = float(self.bins[:, 0].sum())
        if not count:
            return {}
        gaps = (self.bins[:, 1] - self.bins[:, 2]).abs().sum()
        return {
            "nll": self.nll / count, "accuracy": float(self.bins[:, 2].sum()) / count, "ece": float(gaps) / count,
        }  # fmt: skip


@dataclass
class EnsembleCalibration:
    """The calibration of each member, and that of their mean."""

    members: list[Calibration]
    mean: Calibration = field(default_factory=Calibration)

    def add(self, logits: Sequence[Tensor], targets: Tensor) -> None:
        """logits: of each member, [..., classes]; one class is the log-odds of 1. targets [...]."""
        counted = targets.flatten() != IGNORED
        known = targets.flatten()[counted].long()
        probs = [probabilities(of_member).flatten(0, -2)[counted] for of_member in logits]
        for member, of_member in zip(self.members, probs, strict=True):
            member.add(of_member, known)
        self.mean.add(torch.stack(probs).mean(0), known)


def probabilities(logits: Tensor) -> Tensor:
    """Of logits [..., classes], in float64; of log-odds [..., 1], those of 0 and 1."""
    logits = logits.double()
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    return logits.softmax(-1)

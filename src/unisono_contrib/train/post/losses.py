"""What post-training makes small: terms of tokens, or pairs, of one micro-batch. Means are over the global batch.

Shapes: B rows, T positions, V vocabulary, m sequences of the micro-batch.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unisono.spec.training import IGNORED
from unisono_contrib.config.sections.post import PostConfig
from unisono_contrib.train.post.draw import log_probs

Sides = Mapping[str, Tensor]


class PostLoss(Protocol):
    """A loss on log-probabilities lp [B, T] of targets, which it weighs by what is known of tokens and of sequences."""

    measures: ClassVar[tuple[str, ...]]

    def known(self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides) -> Tensor:
        """What is to be kept of the reference model's log-probabilities."""
        ...

    def terms(
        self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides
    ) -> tuple[Tensor, Tensor]:
        """(what the loss of the micro-batch is the sum of, its measures summed, float64)."""
        ...


_LOG_PROBS = ("sampled", "reference")  # sides that were computed, as the log-probabilities themselves are


def size_of(loss: PostLoss, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides) -> float:
    """How large the numbers are of which a loss is a sum, however much of them cancels: an error of all
    log-probabilities x by one part in a billion, and of all terms, is one of at most a billionth of this. It is the
    largest of Σ |term| and of Σ |∂loss/∂x · x|, summed over each of the log-probabilities that the loss reads, to first
    order (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 1.6). Of -Σ log p it is the loss itself."""
    known = lambda sides: {
        name: x.detach().clone().requires_grad_() if name in _LOG_PROBS else x for name, x in sides.items()
    }
    with torch.enable_grad():
        lp, by_token, by_sequence = lp.detach().clone().requires_grad_(), known(by_token), known(by_sequence)
        terms, _ = loss.terms(lp, counted, by_token, by_sequence)
        read = [
            lp,
            *(sides[name] for sides in (by_token, by_sequence) for name in _LOG_PROBS if name in sides),
        ]
        slopes = torch.autograd.grad(terms.sum(), read, allow_unused=True)
    moved = sum(
        float((x.detach() * g).abs().sum()) for x, g in zip(read, slopes, strict=True) if g is not None
    )
    return max(float(terms.detach().abs().sum()), moved)


def counted_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the targets that count and 0 elsewhere, which do, bool); both [B, T]."""
    counted = targets != IGNORED
    lp = log_probs(logits, targets.clamp(min=0), temperature)
    return torch.where(counted, lp, 0.0), counted


class PolicyLoss:
    """Clipped policy gradient with truncated importance weights, and a penalty for leaving the reference.

    Of a token: -min(r A, clip(r, 1 - clip, 1 + clip) A) + kl · (ρ - 1 - log ρ), with r the probability now over that
    of the sampler (PPO, Schulman et al., 2017; groups: Shao et al., DeepSeekMath, 2024), at most `truncate` (V-trace,
    Espeholt et al., 2018), and ρ the reference's probability over that now (Schulman, "Approximating KL divergence",
    2020). Where nothing was drawn, as in supervised steps, it is -log p.
    """

    measures: ClassVar[tuple[str, ...]] = ("tokens", "apart", "kl", "truncated")

    def __init__(self, section: PostConfig) -> None:
        self._how = section

    def known(self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides) -> Tensor:
        """Each token's."""
        return lp

    def terms(
        self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides
    ) -> tuple[Tensor, Tensor]:
        """by_token: weight; of drawn tokens advantage and sampled, the sampler's log-probability; and reference."""
        how, weight = self._how, by_token["weight"].to(lp.dtype)
        if "advantage" not in by_token:
            return -(weight * lp), lp.new_zeros(len(self.measures), dtype=torch.float64)
        advantage, sampled = by_token["advantage"].to(lp.dtype), by_token["sampled"].to(lp.dtype)
        ratio = (lp.detach() - sampled).exp()
        bound = ratio.clamp(max=how.truncate) if how.truncate else ratio
        bound = bound * (lp - lp.detach()).exp()  # the value of `bound`, and its gradient by lp
        gain = bound * advantage
        if how.clip:
            gain = torch.minimum(gain, bound.clamp(1.0 - how.clip, 1.0 + how.clip) * advantage)
        loss = -gain
        if "reference" in by_token:
            away = by_token["reference"].to(lp.dtype) - lp
            loss = loss + how.kl * (away.expm1() - away)
        apart = torch.where(counted, (lp.detach() - sampled).double(), 0.0)
        cut = counted & (ratio > how.truncate) if how.truncate else counted & False
        measured = (counted, apart.abs(), apart.expm1() - apart, cut)
        return torch.where(counted, weight * loss, 0.0), torch.stack([x.double().sum() for x in measured])


class PreferenceLoss:
    """DPO (Rafailov et al., 2023): -log σ(beta · (what the chosen answer has gained on the reference - what the
    rejected one has)). Sequences 2k and 2k + 1 of a micro-batch are a pair."""

    measures: ClassVar[tuple[str, ...]] = ("pairs", "right", "margin")

    def __init__(self, section: PostConfig) -> None:
        self._beta = section.beta

    def known(self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides) -> Tensor:
        """Each sequence's, [m]."""
        sequence = by_token["sequence"][counted]
        return lp.new_zeros(len(by_sequence["length"])).index_add(0, sequence, lp[counted])

    def terms(
        self, lp: Tensor, counted: Tensor, by_token: Sides, by_sequence: Sides
    ) -> tuple[Tensor, Tensor]:
        """by_token: sequence, its number; by_sequence: reference."""
        reference = by_sequence["reference"].to(lp.dtype)
        sequence = by_token["sequence"][counted]
        sums = torch.zeros_like(reference).index_add(0, sequence, lp[counted])
        gained = sums - reference
        margin = self._beta * (gained[0::2] - gained[1::2])
        seen = margin.detach().double()
        measured = (torch.ones_like(seen), (seen > 0).double(), seen)
        return -logsigmoid(margin), torch.stack([x.sum() for x in measured])

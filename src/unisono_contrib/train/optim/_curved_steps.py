"""Live optimisers whose state is of whole matrices, and lies with their owners: `shampoo` and `soap`."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono_contrib.train.optim._matrices import decomposition_cost
from unisono_contrib.train.optim._muon_steps import LEAST, RMS
from unisono_contrib.train.optim._whole_steps import WholeSteps, gradient
from unisono_contrib.train.step.owners import Owners

FirstState = Callable[[Tensor], dict[str, Tensor]]
SIDES = ("left", "right")
APART = 1e-3  # of the mean eigenvalue


def inverse_root(x: Tensor, power: float, damping: float) -> Tensor:
    """(x + λI)^-power of a symmetric x [m, m] without negative eigenvalues; λ: `damping` times their mean. Of zeros it
    is I, as of the mean of gradients that half of a new adapter has: nothing is known, and no number is infinite."""
    values, vectors = torch.linalg.eigh(x.double())
    floor = damping * values.mean().clamp(min=0) + torch.finfo(torch.float64).tiny
    root = (vectors * (values.clamp(min=0) + floor) ** -power) @ vectors.mT
    return torch.where(values[-1] > torch.finfo(x.dtype).tiny ** 0.5, root, torch.eye(len(x)).to(root)).to(
        x.dtype
    )


def inverse_root_within(
    x: Tensor, error: Tensor, power: float, damping: float, rounding: float
) -> tuple[Tensor, float]:
    """(`inverse_root(x)`, how far it may be off in the Frobenius norm), if x is off by `error`, by element.

    -y^-power is operator monotone, so above the floor λ it stretches a distance by at most its slope there, power
    λ^(-power - 1) (Bhatia, "Matrix analysis", 1997, X.3.8); and no root is larger than λ^-power."""
    value, size = inverse_root(x, power, damping), len(x)
    off = float(error.norm()) * (1 + damping) + rounding * float(x.norm())
    floor = damping * max(0.0, float(x.trace()) - float(error.diagonal().sum())) / size
    if not power:
        return value, rounding * math.sqrt(size)
    if not floor:
        return value, math.inf if off else 0.0
    most = 2 * floor**-power * math.sqrt(size)
    return value, min(power * floor ** (-power - 1) * off, most) + rounding * floor**-power * math.sqrt(size)


def _eigh_apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [m, m] with a small diagonal added, in float64. Gradients of few tokens leave most eigenvalues zero, whose
    vectors rounding alone would choose: each run would have another optimiser."""
    more = torch.linspace(1.0, 0.0, len(x), dtype=torch.float64, device=x.device)
    return torch.linalg.eigh(x.double() + torch.diag(more * (APART * x.double().diagonal().mean())))


def basis(x: Tensor) -> Tensor:
    """The eigenvectors of a symmetric x [m, m] as columns, by their eigenvalue; the sum of each is not negative."""
    _, vectors = _eigh_apart(x)
    return (vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)).to(x.dtype)


def basis_within(x: Tensor, error: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """(`basis(x)`, the largest absolute error of an element), if x is off by `error`, by element.

    A direction turns by at most 2 sqrt(2) times the distance of the matrices over the gap to the next eigenvalue (Davis
    and Kahan, 1970; Yu, Wang & Samworth, 2015). Where that is not less than the sum of its elements could bear, its
    sign is not determined either."""
    values, vectors = _eigh_apart(x)
    off = float(error.norm()) * (1 + APART) + rounding * float(x.norm())
    ends = torch.cat((values[:1] - math.inf, values, values[-1:] + math.inf)).diff()
    turned = 2 * math.sqrt(2) * off / torch.minimum(ends[:-1], ends[1:])
    unsure = ~(vectors.sum(0).abs() > math.sqrt(len(x)) * turned)
    turned = torch.where(unsure, 2.0, turned.clamp(max=2.0)) + rounding
    return basis(x.double()), turned.expand_as(vectors).clone()


class CurvedSteps(WholeSteps):
    """Steps matrices by state of whole ones. first(matrix): the state before the first step. interval: updates from one
    decomposition to the next."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, first: FirstState, interval: int) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.first, self.interval = first, interval

    def cost(self, shape: Sequence[int]) -> float:
        return decomposition_cost(shape)

    def share(self, owners: Owners, over_dp: bool) -> None:
        super().share(owners, over_dp)
        for p, matrix in owners.matrices.items():
            self.state[p] = self.first(p.new_empty(matrix.shape)) if owners.owns(p) else {}
            self.owned[p] = over_dp

    def send(self, p: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        return gradient(p)

    def direction(self, p: nn.Parameter, whole: Tensor, group: Mapping[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(self.first(whole))
        move = self.advance(state, whole, int(state["step"]))
        state["step"] += 1
        return move

    @abstractmethod
    def advance(self, state: dict[str, Tensor], grad: Tensor, step: int) -> Tensor:
        """The direction [m, n], by a whole gradient; `state` is brought up to date. step: updates made before."""


def add_products(state: Mapping[str, Tensor], grad: Tensor, keep: float) -> None:
    """Let the means of G Gᵀ and Gᵀ G take in a gradient."""
    for side, x in zip(SIDES, (grad, grad.mT), strict=True):
        if side in state:
            state[side].lerp_(x @ x.mT, 1 - keep)


def rotated(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """leftᵀ x right, of the sides that there are."""
    x = x if left is None else left.mT @ x
    return x if right is None else x @ right


def to_rms(move: Tensor) -> Tensor:
    """The direction, as long as one of AdamW usually is."""
    return move * (RMS * math.sqrt(move.numel()) / move.norm().clamp(min=LEAST**2))


class ShampooSteps(CurvedSteps):
    """Momentum between the inverse roots of both means."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, first: FirstState, interval: int,
        keep: tuple[float, float], power: float, damping: float, rms: bool,
    ) -> None:  # fmt: skip
        """keep: decay of the momentum, and of the means. rms: see `to_rms`."""
        super().__init__(groups, lr, first, interval)
        self.keep, self.power, self.damping, self.rms = keep, power, damping, rms

    def advance(self, state: dict[str, Tensor], grad: Tensor, step: int) -> Tensor:
        momentum = state["momentum_buffer"].lerp_(grad, 1 - self.keep[0])
        self.learn(state, grad)
        if step % self.interval == 0:
            for side in (side for side in SIDES if side in state):
                state[f"{side}_root"].copy_(inverse_root(state[side], self.power, self.damping))
        move = rotated(momentum, state.get("left_root"), state.get("right_root"))
        return to_rms(move) if self.rms else move

    def learn(self, state: dict[str, Tensor], grad: Tensor) -> None:
        """Bring the means of both sides up to date."""
        add_products(state, grad, self.keep[1])


class SoapSteps(CurvedSteps):
    """AdamW in the eigenvectors of both means."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, first: FirstState, interval: int,
        betas: tuple[float, float], keep: float, eps: float,
    ) -> None:  # fmt: skip
        """keep: decay of the means."""
        super().__init__(groups, lr, first, interval)
        self.betas, self.keep, self.eps = betas, keep, eps

    def advance(self, state: dict[str, Tensor], grad: Tensor, step: int) -> Tensor:
        (b1, b2), bases = self.betas, (state.get("left_basis"), state.get("right_basis"))
        momentum = state["exp_avg"].lerp_(grad, 1 - b1)
        seen = rotated(grad, *bases)
        square = state["exp_avg_sq"].mul_(b2).addcmul_(seen, seen, value=1 - b2)
        below = square.sqrt().div_(math.sqrt(1 - b2 ** (step + 1))).add_(self.eps)
        move = rotated(momentum, *bases) / below / (1 - b1 ** (step + 1))
        move = rotated(move, *(None if q is None else q.mT for q in bases))
        add_products(state, grad, self.keep)
        if step % self.interval == 0:
            for side in (side for side in SIDES if side in state):
                state[f"{side}_basis"].copy_(basis(state[side]))
        return move

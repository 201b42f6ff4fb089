"""A server that steps along a velocity of deltas, as torch's SGD steps along one of gradients."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VELOCITY = "velocity"


def momentum_step(
    delta: "Tensor", velocity: "Tensor", lr: float, momentum: float, nesterov: bool
) -> "Tensor":
    """What is added to the weights: lr times the velocity, to which the delta adds, or with Nesterov's look ahead times
    `delta + momentum * velocity`. velocity: changed in place."""
    velocity.mul_(momentum).add_(delta)
    return lr * (delta + momentum * velocity if nesterov else velocity)

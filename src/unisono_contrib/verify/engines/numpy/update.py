"""Clipping and the update in NumPy, float64.

AdamW is Loshchilov & Hutter's (2019), momentum Sutskever et al.'s (2013).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from unisono_contrib.verify.engines.numpy.net import Array


@dataclass(frozen=True, slots=True)
class Law:
    """How weights change, by the keys of `[train]`. optimizer: adamw or sgd."""

    optimizer: str
    clip: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float


def stepped(
    law: Law, before: Mapping[str, Array], raw: Mapping[str, Array], lr: float, step: int
) -> dict[str, Array]:
    """What clipping and the update make of gradients: `grad/NAME`, `model/NAME` and `optim/NAME/STATE`.

    before: `model/NAME` and `optim/NAME/STATE` before the step; no state before the first one. raw: gradients by the
    names of their weights. step: updates made before.
    """
    norm = math.sqrt(math.fsum(float((g * g).sum()) for g in raw.values()))
    factor = law.clip / (norm + 1e-6) if law.clip and norm > law.clip else 1.0
    out: dict[str, Array] = {}
    for name, g in raw.items():
        out[f"grad/{name}"] = clipped = g * factor
        weight = before[f"model/{name}"]
        decay = law.weight_decay if weight.ndim >= 2 else 0.0

        def kept(key: str, name: str = name) -> Array:
            return before.get(f"optim/{name}/{key}", 0.0 * before[f"model/{name}"])

        if law.optimizer == "sgd":
            velocity = clipped + decay * weight
            if law.momentum:
                velocity = velocity + law.momentum * kept("momentum_buffer")
                out[f"optim/{name}/momentum_buffer"] = velocity
            out[f"model/{name}"] = weight - lr * velocity
            continue
        b1, b2 = law.betas
        m = b1 * kept("exp_avg") + (1 - b1) * clipped
        v = b2 * kept("exp_avg_sq") + (1 - b2) * clipped * clipped
        out[f"optim/{name}/exp_avg"], out[f"optim/{name}/exp_avg_sq"] = m, v
        move = (m / (1 - b1 ** (step + 1))) / ((v / (1 - b2 ** (step + 1))) ** 0.5 + law.eps)
        out[f"model/{name}"] = weight * (1 - lr * decay) - lr * move
    return out

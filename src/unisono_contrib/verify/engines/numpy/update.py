"""Clipping and the update in NumPy, float64.

AdamW is Loshchilov & Hutter's (2019), momentum Sutskever et al.'s (2013).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unisono_contrib.verify.engines.numpy.net import Array


@dataclass(frozen=True, slots=True)
class UpdateLaw:
    """How weights change, by the keys of `[train]`. optimizer: adamw or sgd."""

    optimizer: str
    clip: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float


def stepped(
    law: UpdateLaw, before: Mapping[str, Array], raw: Mapping[str, Array], lr: float, step: int
) -> dict[str, Array]:
    """What clipping and the update make of gradients: `grad/NAME`, `model/NAME` and `optim/NAME/STATE`.

    before: `model/NAME` and `optim/NAME/STATE` before the step; no state before the first one. raw: gradients by the
    names of their weights. step: updates made before.
    """
    norm = math.sqrt(math.fsum(float((g * g).sum()) for g in raw.values()))
    factor = law.clip / (norm + 1e-6) if law.clip and norm > law.clip else 1.0
    out: dict[str, Array] = {}
    for name, g in raw.items():
        weight, prefix = before[f"model/{name}"], f"optim/{name}/"
        state = {key.removeprefix(prefix): x for key, x in before.items() if key.startswith(prefix)}
        decay = law.weight_decay if weight.ndim >= 2 else 0.0
        after, state = UPDATES[law.optimizer](law, weight, g * factor, state, Rates(lr, decay, step))
        out[f"grad/{name}"], out[f"model/{name}"] = g * factor, after
        out |= {prefix + key: x for key, x in state.items()}
    return out


class Rates(NamedTuple):
    """Of one weight in one step. step: updates made before."""

    lr: float
    decay: float
    step: int


State = Mapping[str, Array]


def _adamw(law: UpdateLaw, w: Array, g: Array, state: State, rates: Rates) -> tuple[Array, State]:
    (b1, b2), t = law.betas, rates.step + 1
    m = b1 * state.get("exp_avg", 0.0 * w) + (1 - b1) * g
    v = b2 * state.get("exp_avg_sq", 0.0 * w) + (1 - b2) * g * g
    move = (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + law.eps)
    return w * (1 - rates.lr * rates.decay) - rates.lr * move, {"exp_avg": m, "exp_avg_sq": v}


def _sgd(law: UpdateLaw, w: Array, g: Array, state: State, rates: Rates) -> tuple[Array, State]:
    velocity = g + rates.decay * w
    if not law.momentum:
        return w - rates.lr * velocity, {}
    velocity = velocity + law.momentum * state.get("momentum_buffer", 0.0 * w)
    return w - rates.lr * velocity, {"momentum_buffer": velocity}


UPDATES = {"adamw": _adamw, "sgd": _sgd}

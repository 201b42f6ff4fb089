"""The recipe's formulas for clipping and the update, with the error that each passes on.

One function serves two questions. From the reference's gradient and its bound: how far may parameters and moments be
from the reference's? And from the plan's own gradient and no error at all: did the plan follow the formula? The second
is the sharper one: it finds what is wrong with an update although all gradients are right.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from unisono.config import TrainConfig
from unisono.spec.training import UpdateSizes
from unisono.verify.record import Record

Keep = Callable[[Tensor], Tensor]  # what a parameter becomes → what it can hold of that, float64
OPERATIONS = 16  # roundings of one optimiser formula, counted generously: all of them touch the same element


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor by which gradients of this norm are clipped (Pascanu et al., 2013)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0


def first_state(train: TrainConfig, name: str, param: Tensor) -> dict[str, Tensor]:
    """What the optimiser keeps of a whole parameter before its first step."""
    return train.optimiser().for_parameter(name, tuple(param.shape)).state(param)


def observed_after(
    train: TrainConfig, record: Record, name: str, relative: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """State of a parameter that its gradient does not tell, as `record` has it after the update, float64, with the
    error that each element may have. relative: to the largest element."""
    out: dict[str, tuple[Tensor, Tensor]] = {}
    member = train.optimiser().for_parameter(name, record.shapes.get(f"model/{name}", ()))
    for key in member.observed:
        if (value := record.whole(f"optim/{name}/{key}")) is not None:
            value = value.double()
            out[key] = value, torch.full_like(value, relative * float(value.abs().max()))
    return out


def update(
    train: TrainConfig,
    param: Tensor,
    state: Mapping[str, Tensor],
    grad: Tensor,
    error: Tensor | float,
    *,
    lr: float,
    step: int,
    unit: float,
    lazy: bool = False,
    keep: Keep | None = None,
    name: str = "",
    observed: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """key → (value, largest absolute error), float64, for "param" and every tensor of the optimiser's state; nothing
    for an optimiser that has no law.

    error: absolute, of `grad`, by element. step: updates made before. unit: roundoff of the run that is predicted.
    lazy: a row without a gradient stays as it is. keep: rounds a parameter, the larger of two never below the other.
    name: of the parameter. observed: see `UpdateSizes`.
    """
    decay = train.weight_decay if param.dim() >= 2 else 0.0  # matrices decay, vectors do not
    g = grad.double()
    after = (
        train.optimiser()
        .for_parameter(name, tuple(param.shape))
        .law(
            UpdateSizes(lr, decay, step, OPERATIONS * unit, observed or {}),
            param.double(),
            {key: value.double() for key, value in state.items()},
            g,
            torch.as_tensor(error, dtype=torch.float64).expand_as(g),
        )
    )
    if keep is not None:
        value, off = after["param"]
        held = keep(value)
        after["param"] = held, torch.maximum(keep(value + off) - held, held - keep(value - off))
    read, old = (g != 0).any(-1, keepdim=True), {"param": param, **state}
    return {
        key: (torch.where(read, value, old[key].double()), torch.where(read, off, 0.0))
        if lazy and value.dim()
        else (value, off)
        for key, (value, off) in after.items()
    }

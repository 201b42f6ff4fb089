"""Two runs, tensor by tensor: how far apart, and where they first part."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unisono.train.checkpoint import load, read_full

KINDS = ("loss", "grad", "param", "optim")


@dataclass(slots=True)
class Difference:
    """Largest relative errors by kind over all steps; an error is |a - b| over the largest |b| of its tensor."""

    max_rel_err: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    bit_identical: bool = True
    first_divergence: str | None = None


def folder_of(run: Path, step: int) -> Path:
    """Where `save` puts step `step`."""
    return run / "checkpoints" / f"step-{step:06d}"


def compare(reference: Path, other: Path, steps: int, bound: float) -> Difference:
    """Walk the steps in order, and in each the loss, gradients, parameters, optimiser state, in forward order."""
    found = Difference()
    for step in range(steps):
        one, two = folder_of(reference, step), folder_of(other, step)
        state_one, state_two = load(one, []), load(two, [])
        for key in ("loss", "norm"):
            a, b = (torch.tensor(state[key], dtype=torch.float64) for state in (state_two, state_one))
            _note(found, "loss", key, step, a, b, bound)
        tensors_one, tensors_two = read_full(one), read_full(two)
        for name in sorted(tensors_one.keys() | tensors_two.keys(), key=_order):
            kind = {"grad": "grad", "model": "param", "optim": "optim"}[name.split("/")[0]]
            if name not in tensors_one or name not in tensors_two:
                found.bit_identical = False
                found.max_rel_err[kind] = float("inf")
                found.first_divergence = (
                    found.first_divergence or f"step {step}: {name} is missing on one side"
                )
                continue
            _note(found, kind, name, step, tensors_two[name], tensors_one[name], bound)
    return found


def _order(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    kind, _, rest = name.partition("/")
    parts = rest.replace("/", ".").split(".")
    place = [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
    stem = {"stem": 0, "blocks": 1, "head": 2}.get(parts[0], 1)
    return ("grad", "model", "optim").index(kind) * 3 + stem, place  # type: ignore[return-value]


def _note(found: Difference, kind: str, name: str, step: int, a: Tensor, b: Tensor, bound: float) -> None:
    if torch.equal(a, b):
        return
    found.bit_identical = False
    scale = b.abs().max().item() if b.numel() else 0.0
    gap = (a.double() - b.double()).abs().max().item()
    error = gap / scale if scale else float("inf")
    if error != error:
        error = float("inf")
    found.max_rel_err[kind] = max(found.max_rel_err[kind], error)
    if error > bound and found.first_divergence is None:
        found.first_divergence = f"step {step}: {name} is off by {error:.1e} of its largest entry"

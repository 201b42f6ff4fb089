"""Fitting a stack's constants to measured steps: few constants, log errors, a robust loss, physical bounds.

The loss is Cauchy's (Holland and Welsch, 1977): a row that is far off pulls ever less, so rows that measure something
that the model has no word for do not bend the others. No row is left out of a fit or of a figure.

numpy is imported here alone: pricing a plan needs none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Protocol

import numpy as np

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.price import price
from unisono.planner.stack import Stack
from unisono.planner.work.transformer import Transformer

# What a constant may be: a share of a peak is at most 1, and no clock shows less than a tenth of a microsecond.
BOUNDS: dict[str, tuple[float, float]] = {
    "matmul": (0.05, 0.95), "attention": (0.05, 0.95), "elementwise": (0.2, 1.0), "tp_bus": (0.1, 1.0),
    "dp_bus": (0.05, 1.0), "p2p": (0.05, 1.0), "depth": (1.0, 1000.0), "wave": (0.05, 1.0),
    "launch": (1e-7, 1e-3), "gap": (1e-7, 1e-4), "collective": (1e-7, 1e-3), "member": (1e-7, 1e-3),
    "micro": (1e-6, 0.1), "step": (1e-4, 1.0),
    "tp_hidden": (0.01, 1.0), "dp_hidden": (0.01, 1.0),
}  # fmt: skip
_ROUNDS, _NUDGE = 25, 1e-3
# Relative errors from which a row weighs less than half. First wide, so that where the fit begins does not matter.
_KNEES = (0.2, 0.05)


class Measurement(Protocol):
    """What was measured, and what it is predicted to be: a step, a kernel."""

    @property
    def seconds(self) -> float: ...

    def predicted(self, stack: Stack) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step: what ran, where, and how long it took. `stack` may change habits that the row names."""

    model: Transformer
    plan: Plan
    cluster: Cluster
    micro_batch: int
    micros: int
    seconds: float
    group: str = ""
    habits: tuple[tuple[str, float], ...] = ()

    def predicted(self, stack: Stack) -> float:
        """Seconds of the step under `stack`."""
        own = replace(stack, **dict(self.habits)) if self.habits else stack
        return price(
            self.model, self.plan, self.cluster, own, micro_batch=self.micro_batch, micros=self.micros
        ).step


def errors(rows: Sequence[Measurement], stack: Stack) -> list[float]:
    """Relative errors, predicted over measured less one."""
    return [row.predicted(stack) / row.seconds - 1.0 for row in rows]


def fit(rows: Sequence[Measurement], stack: Stack, constants: Sequence[str]) -> Stack:
    """The stack with `constants` fitted to `rows`, the others as they are.

    Levenberg and Marquardt's steps on the constants' logarithms.
    """
    for knee in _KNEES:
        stack = _descend(rows, stack, constants, knee)
    return stack


def _descend(rows: Sequence[Measurement], stack: Stack, constants: Sequence[str], knee: float) -> Stack:

    def residuals(x: Sequence[float]) -> np.ndarray:
        made = _with(stack, constants, x)
        return np.array([log(row.predicted(made) / row.seconds) for row in rows])

    x = np.array([log(_clipped(name, getattr(stack, name))) for name in constants])
    low, high = (
        np.log([BOUNDS[name][0] for name in constants]),
        np.log([BOUNDS[name][1] for name in constants]),
    )
    here, damping = residuals(x.tolist()), 1e-2
    for _ in range(_ROUNDS):
        slopes = _slopes(residuals, x, here)
        weights = 1.0 / (1.0 + (here / knee) ** 2)
        normal, pull = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * here)
        moved = False
        while damping < 1e6 and not moved:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -pull)
            # One e-fold at a time: further out the slopes say nothing.
            there = np.clip(x + np.clip(step, -1.0, 1.0), low, high)
            after = residuals(there.tolist())
            moved = _loss(after, knee) < _loss(here, knee) * (1 - 1e-6)
            damping = damping / 5 if moved else damping * 5
            if moved:
                x, here = there, after
        if not moved:
            break
    return _with(stack, constants, x.tolist())


def _slopes(
    residuals: Callable[[Sequence[float]], np.ndarray], x: np.ndarray, here: np.ndarray
) -> np.ndarray:
    """Derivatives by each constant, one column each, by small steps towards its lower bound."""
    columns = []
    for i in range(len(x)):
        nudged = x.copy()
        nudged[i] -= _NUDGE
        columns.append((here - residuals(nudged.tolist())) / _NUDGE)
    return np.stack(columns, axis=1)


def _loss(residuals: np.ndarray, knee: float) -> float:
    return float(np.sum(np.log1p((residuals / knee) ** 2)))


def _clipped(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(max(value, low), high)


def _with(stack: Stack, constants: Sequence[str], x: Sequence[float]) -> Stack:
    return replace(stack, **{name: exp(v) for name, v in zip(constants, x, strict=True)})

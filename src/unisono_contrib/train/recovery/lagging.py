"""A part of each step that takes longer on one rank, once a step: `--chaos "lag:who=2:step=10:part=backward"`."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from unisono.observe.span import OpenSpan, Recorder
from unisono_contrib.programs.chaos.fault import Fault


class PartLag:
    """Sleeps in one part of each step of `recorder` while it is on. It is off until `begin`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._part, self._leaf, self._until, self._inside = "", 0.0, 0.0, False
        self._slept: int | None = None  # in which step it did so last

    def begin(self, fault: Fault, stages: list[nn.Module]) -> None:
        """From now on, for `fault.seconds`. stages: of this rank, one of which may have the module that is named."""
        self._part, self._leaf, self._inside = fault.part, fault.leaf, bool(fault.module)
        self._until = time.monotonic() + fault.seconds
        for stage in stages if fault.module else ():
            for name, module in stage.named_modules():
                if name == fault.module:
                    self._enclose(module)

    def over(self, kind: str) -> None:
        """A span of this kind is about to end."""
        if kind == self._part and not self._inside:
            self.sleep()

    def sleep(self) -> None:
        """Once a step."""
        step = self._recorder.step
        if step != self._slept and time.monotonic() < self._until:
            self._slept = step
            time.sleep(self._leaf)

    def _enclose(self, module: nn.Module) -> None:
        inner = module.forward

        def forward(*args: Any, **named: Any) -> Any:
            if self._part == "forward":
                self.sleep()
            y = inner(*args, **named)
            return _Late.apply(y, self) if self._part == "backward" and isinstance(y, Tensor) else y

        module.forward = forward


class _Late(torch.autograd.Function):
    """A tensor as it is, whose gradient comes late."""

    @staticmethod
    def forward(ctx, x, lag):  # type: ignore[override]
        ctx.lag = lag
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ctx.lag.sleep()
        return grad, None


class LaggingSpan(OpenSpan):
    """A part of a step that ends later while it lags."""

    __slots__ = ("lag",)
    lag: PartLag

    def __exit__(self, *raised: object) -> None:
        self.lag.over(self.kind)
        super().__exit__(*raised)

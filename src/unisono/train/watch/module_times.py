"""Which module of a rank takes how long, forward and backward: looked at in some steps, by hooks that go again.

Four readings of the clock a module and micro-batch: forward from its call to its return, backward from the gradient of
what it returned to the gradient of what it was called with. Waits for other ranks are left out, and so is what modules
inside it take, so that of all ranks the one with more of it computes longer. No number of a step changes.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.device import is_apart
from unisono.observe.span import Recorder

MOST = 256
"""Modules of a rank that are timed: blocks and what they are made of, or blocks alone."""
SHARE = 0.002
"""Of all time, what looking may take."""
SOON_S, LATER_S, SOON_FOR_S = 1.0, 5.0, 60.0
"""Seconds between two looks, in the first minute and later."""
_HOOK_S = 3e-6  # what one hook takes, without what it looks at: benchmarks/sight.py
_HOOKS = 7  # of a module and micro-batch: two around forward, two gradients, and making these


class ModuleTimes:
    """Times the modules of this rank's stages in steps whose number is a multiple of a power of two: so ranks that look
    more rarely look at the same steps as the others.

    modules: what is timed, by logical name; none where hooks would cost more than they say, on a GPU and in compiled
    modules.
    """

    def __init__(self, stages: Mapping[int, nn.Module], recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        compiled = any(getattr(m, "_compiled_call_impl", None) for s in stages.values() for m in s.modules())
        self.modules = {} if compiled or is_apart(device) else dict(_timed(stages.values()))
        self._look: _Look | None = None
        self._due = False
        self._began = time.monotonic()
        self._cost_s = len(self.modules) * _HOOKS * _HOOK_S

    def stepped(self, step: int, seconds: float) -> None:
        """After step `step`, which took so long: hand its times to the recorder."""
        if self._look is not None:
            self.recorder.modules = self._end(self._look)
        self._due = bool(self.modules) and (step + 1) % self._every(seconds) == 0

    def begin(self) -> None:
        """The next step is about to begin: look at it if it is time to."""
        if self._due:
            self._due, self._look = False, self._hooked()

    def close(self) -> None:
        """No hook stays."""
        if self._look is not None:
            self._end(self._look)

    def _every(self, seconds: float) -> int:
        """Steps from one look to the next, a power of two. seconds: of a step."""
        early = time.monotonic() - self._began < SOON_FOR_S
        pause = max(SOON_S if early else LATER_S, self._cost_s / SHARE)
        every = 1
        while every * max(seconds, 1e-6) < pause:
            every *= 2
        return every

    def _hooked(self) -> "_Look":
        look = _Look(self.recorder, list(self.modules))
        for at, module in enumerate(self.modules.values()):
            look.handles.append(module.register_forward_pre_hook(partial(look.entered, at)))
            look.handles.append(module.register_forward_hook(partial(look.left, at)))
        return look

    def _end(self, look: "_Look") -> dict[str, tuple[float, float]]:
        self._look = None
        for handle in look.handles:
            handle.remove()
        self._cost_s = look.hooks * _HOOK_S
        return look.spent()


class _Look:
    """One step that is looked at. Its times are the recorder's, less those in which the rank waited."""

    def __init__(self, recorder: Recorder, names: list[str]) -> None:
        self._recorder, self._names = recorder, names
        self.handles: list[Any] = []
        self.hooks = 0
        self._entered = [0] * len(names)
        self._forward = [0] * len(names)
        self._backward = [0] * len(names)
        self._open: dict[int, int] = {}  # backwards under way
        self._heads: set[int] = set()  # modules whose backward ends with their parameters

    def _now(self) -> int:
        self.hooks += 1
        return self._recorder.now_ns() - self._recorder.blocked_ns

    def entered(self, at: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered[at] = self._now()

    def left(self, at: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._forward[at] += self._now() - self._entered[at]
        y = _differentiable(output)
        # Gradients of samples (torch.func) come by no hook.
        if y is None or torch._C._are_functorch_transforms_active():
            return
        self.hooks += 2
        y.register_hook(partial(self._reached, at))
        if (x := _differentiable(args)) is not None:
            x.register_hook(partial(self._passed, at))
        elif at not in self._heads:
            self._heads.add(at)
            for p in module.parameters():
                if p.requires_grad:
                    self.handles.append(p.register_post_accumulate_grad_hook(partial(self._kept, at)))

    def _reached(self, at: int, grad: Tensor) -> None:
        self._open[at] = self._now()

    def _passed(self, at: int, grad: Tensor) -> None:
        if (since := self._open.pop(at, None)) is not None:
            self._backward[at] += self._now() - since

    def _kept(self, at: int, parameter: Tensor) -> None:
        """The gradient of a parameter is there: maybe the last one."""
        if (since := self._open.get(at)) is not None:
            now = self._now()
            self._backward[at] += now - since
            self._open[at] = now

    def spent(self) -> dict[str, tuple[float, float]]:
        """Seconds of each module's own in forward and in backward."""
        places = {name: at for at, name in enumerate(self._names)}
        forward, backward = list(self._forward), list(self._backward)
        for name, at in places.items():
            around = places.get(name.rpartition(".")[0])
            if around is not None:
                forward[around] -= self._forward[at]
                backward[around] -= self._backward[at]
        return {
            name: (round(max(0, forward[at]) * 1e-9, 6), round(max(0, backward[at]) * 1e-9, 6))
            for name, at in places.items()
        }


def _timed(stages: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Stem, blocks, head, and what blocks are made of, as far as they have parameters."""
    named = [
        (name, module)
        for stage in stages
        for name, module in stage.named_modules()
        if name and name != "blocks" and next(module.parameters(), None) is not None
    ]
    depth = lambda name: name.count(".") - name.startswith("blocks.")
    parts = [
        pair
        for pair in named
        if depth(pair[0]) <= 1 and (depth(pair[0]) == 0 or pair[0].startswith("blocks."))
    ]
    return iter(parts if len(parts) <= MOST else [pair for pair in parts if depth(pair[0]) == 0][:MOST])


def _differentiable(value: Any) -> Tensor | None:
    """The first tensor in it that a gradient reaches."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    for each in value if isinstance(value, tuple | list) else ():
        if (x := _differentiable(each)) is not None:
            return x
    return None

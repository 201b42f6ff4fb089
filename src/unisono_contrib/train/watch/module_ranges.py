"""A range in torch's profile around each forward of each module, by its name in the whole model."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch._C._profiler import _RecordFunctionFast

from unisono_contrib.report.profile.kineto import MODULE


class ModuleRanges:
    """Hooks on the modules of some stages, until they are removed. A block that was compiled is one range: what is
    inside is one graph."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._open: list[Any] = []
        self._hooks: list[Any] = []
        for stage in stages:
            self._enter("", stage)

    def _enter(self, name: str, module: nn.Module) -> None:
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            self._hooks += [
                module.register_forward_pre_hook(self._begin(name)),
                module.register_forward_hook(self._end, always_call=True),
            ]
        if module._compiled_call_impl is None:
            for key, child in module.named_children():
                self._enter(f"{name}.{key}" if name else key, child)

    def _begin(self, name: str) -> Callable[[nn.Module, Any], None]:
        label = MODULE + name

        def begin(module: nn.Module, args: Any) -> None:
            mark = _RecordFunctionFast(label)
            mark.__enter__()
            self._open.append(mark)

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """No hook is left."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

"""In the first steps: are hooks on gradients inside the graph linear? Those of modules, and of tensors that are no
parameters, run as each rank's backward goes on, so they cannot wait for gradients to meet (`deferred`).

A rank's part of a linear hook's result is the hook's result for the rank's part. Of others that does not hold.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.library.following import Following
from unisono.library.traces import Trace

Told = Callable[[str, str], object]


class WatchedHook:
    """A hook that is followed while `following` looks."""

    def __init__(self, hook: Any, following: Following, told: Told) -> None:
        self._hook, self._following, self._told = hook, following, told

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_hook" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __call__(self, *args: Any) -> Any:
        if not self._following.looking():
            return self._hook(*args)
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        with self._following.alone() as follow:
            for x in given:
                follow.mark(
                    x,
                    Trace(
                        0, max(1, x.shape[0] if x.dim() else 1), 0 if x.dim() else None, reduced="gradient"
                    ),
                )
            out = self._hook(*args)
            for x in (*given, *tree_leaves(out)):
                trace = follow.of(x)
                if trace is not None and trace.met:
                    self._told("J27", f"{getattr(self._hook, '__qualname__', 'a hook')}: {trace.met}")
        return out


def watch(hooks: Any, following: Following, told: Told) -> None:
    """Have hooks in this dict of torch's followed."""
    for key, hook in list((hooks or {}).items()):
        if not isinstance(hook, WatchedHook):
            hooks[key] = WatchedHook(hook, following, told)


def watch_modules(model: nn.Module, following: Following, told: Told) -> None:
    """Those on the gradients of a model's modules."""
    for module in model.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                watch(hooks, following, told)

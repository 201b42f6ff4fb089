"""In the first steps: is what the script does to gradients inside the graph linear? Hooks of modules, hooks of tensors
that are no parameters, and backwards of the script's own functions run as each rank's backward goes on. So they cannot
wait for gradients to meet, as `deferred` does.

A rank's part of a linear hook's result is the hook's result for the rank's part. Of others that does not hold.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.library.following import Following
from unisono.library.traces import SampleTrace

Description = Callable[[str, str], object]


class WatchedHook:
    """A hook that is followed while `following` looks."""

    def __init__(self, hook: Any, following: Following, told: Description) -> None:
        self._hook, self._following, self._told = hook, following, told

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_hook" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __call__(self, *args: Any) -> Any:
        if not self._following.looking():
            return self._hook(*args)
        given = tree_leaves(args)
        with self._following.alone() as follow:
            _mark(follow, given)
            out = self._hook(*args)
            met = _met(follow, [*given, *tree_leaves(out)])
        if met:
            self._told("J27", f"{getattr(self._hook, '__qualname__', 'a hook')}: {met}")
        return out


class WatchedFunction:
    """The backward of an autograd function of the script's own, between two hooks on its node."""

    def __init__(self, name: str, following: Following, told: Description) -> None:
        self._name, self._following, self._told = name, following, told
        self._inside: AbstractContextManager[Following] | None = None

    def begin(self, gradients: Any) -> None:
        if self._following.looking() and self._inside is None:
            self._inside = self._following.alone()
            self._inside.__enter__()
            _mark(self._following, tree_leaves(gradients))

    def end(self, gradients: Any, _: Any) -> None:
        if self._inside is not None:
            inside, self._inside = self._inside, None
            met = _met(self._following, tree_leaves(gradients))
            inside.__exit__(None, None, None)
            if met:
                self._told("J27", f"the backward of {self._name}: {met}")


def watch_functions(functions: Mapping[Any, str], following: Following, told: Description) -> None:
    """Autograd functions of the script's own, by their nodes in a graph."""
    for node, name in functions.items():
        watched = WatchedFunction(name, following, told)
        node.register_prehook(watched.begin)
        node.register_hook(watched.end)


def _mark(following: Following, gradients: Sequence[Any]) -> None:
    for x in gradients:
        if isinstance(x, Tensor):
            rows = x.shape[0] if x.dim() else 1
            following.mark(x, SampleTrace(0, max(1, rows), 0 if x.dim() else None, reduced="gradient"))


def _met(following: Following, gradients: Sequence[Any]) -> str:
    traces = (following.of(x) for x in gradients)
    return next((trace.met for trace in traces if trace is not None and trace.met), "")


def watch(hooks: Any, following: Following, told: Description) -> None:
    """Have hooks in this dict of torch's followed."""
    for key, hook in list((hooks or {}).items()):
        if not isinstance(hook, WatchedHook):
            hooks[key] = WatchedHook(hook, following, told)


def watch_modules(model: nn.Module, following: Following, told: Description) -> None:
    """Those on the gradients of a model's modules."""
    for module in model.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                watch(hooks, following, told)

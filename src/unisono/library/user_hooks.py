"""Hooks of the user's on gradients.

**On parameters** they run when the gradients have met, so that they see those of the global batch: a hook may clip, or
step an optimiser. torch calls hooks as one rank's gradient arrives. So the dicts in which torch looks for them give it
a placeholder for each hook of the user's, whenever it is put there, and keep ours as they are.

**Inside the graph** (hooks of modules, of tensors that are no parameters, backwards of the script's own functions) they
run as each rank's backward goes on, and cannot wait. A rank's part of a linear hook's result is the hook's result for
the rank's part. In the first steps it is looked whether they are linear.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.library.batch_tracer import BatchTracer
from unisono.library.traces import SampleTrace
from unisono.parallel.params import local_of

Hook = Callable[[Tensor], Any]
_OURS = ("unisono.", "unisono_contrib.", "torch.distributed.")


class Placeholder:
    """Does nothing in a hook's place."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, *_: object) -> None:
        return None


class Hooks(OrderedDict[int, Any]):
    """A tensor's dict of hooks. before: the dict that it had, in which the handles of earlier hooks look for them."""

    def __init__(self, before: "dict[int, Any] | None") -> None:
        super().__init__()
        self.before = {} if before is None else before

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook if _is_ours(hook) else Placeholder(hook))

    def users(self) -> Iterator[Hook]:
        yield from self.before.values()
        yield from (hook.hook for hook in self.values() if isinstance(hook, Placeholder))


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return (getattr(function, "__module__", "") or "").startswith(_OURS)


class DeferredHooks:
    """The user's hooks on one parameter."""

    def __init__(self, p: Tensor) -> None:
        self._p, self._old = p, None
        p._backward_hooks = self._on_gradient = Hooks(p._backward_hooks)
        self._afterwards = Hooks(getattr(p, "_post_accumulate_grad_hooks", None))
        p._post_accumulate_grad_hooks = self._afterwards  # type: ignore[attr-defined]

    def there(self) -> bool:
        """Whether the user has hooks on it."""
        return any(True for each in (self._on_gradient, self._afterwards) for _ in each.users())

    def begin(self) -> None:
        """Put aside the gradient of earlier backwards, since hooks see the new one alone."""
        grad = self._p.grad
        self._old = None if grad is None else grad.detach().clone()
        self._p.grad = None

    @torch.no_grad()
    def end(self) -> None:
        """Call the hooks with the gradient of the global batch, and add what was put aside."""
        p, old = self._p, self._old
        self._old, grad = None, p.grad
        if grad is None:
            p.grad = old
            return
        for hook in list(self._on_gradient.users()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        if old is not None:
            local_of(old).add_(local_of(grad))
            grad = old
        p.grad = grad
        for hook in list(self._afterwards.users()):
            hook(p)


def begin_all(hooks: Sequence[DeferredHooks]) -> list[DeferredHooks]:
    """Begin a backward; return the parameters on which the user has hooks."""
    hooked = [deferred for deferred in hooks if deferred.there()]
    for deferred in hooked:
        deferred.begin()
    return hooked


Notify = Callable[[str, str], object]


class WatchedHook:
    """A hook that is followed while `following` looks."""

    def __init__(self, hook: Any, following: BatchTracer, notify: Notify) -> None:
        self._hook, self._following, self._notify = hook, following, notify

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_hook" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __call__(self, *args: Any) -> Any:
        if not self._following.looking():
            return self._hook(*args)
        gradients = tree_leaves(args)
        with self._following.alone() as follow:
            _mark(follow, gradients)
            out = self._hook(*args)
            met = _met(follow, [*gradients, *tree_leaves(out)])
        if met:
            self._notify("J27", f"{getattr(self._hook, '__qualname__', 'a hook')}: {met}")
        return out


class WatchedFunction:
    """The backward of an autograd function of the script's own, between two hooks on its node."""

    def __init__(self, name: str, following: BatchTracer, notify: Notify) -> None:
        self._name, self._following, self._notify = name, following, notify
        self._inside: AbstractContextManager[BatchTracer] | None = None

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
                self._notify("J27", f"the backward of {self._name}: {met}")


def watch_functions(functions: Mapping[Any, str], following: BatchTracer, notify: Notify) -> None:
    """Autograd functions of the script's own, by their nodes in a graph."""
    for node, name in functions.items():
        watched = WatchedFunction(name, following, notify)
        node.register_prehook(watched.begin)
        node.register_hook(watched.end)


def _mark(following: BatchTracer, gradients: Sequence[Any]) -> None:
    for x in gradients:
        if isinstance(x, Tensor):
            rows = x.shape[0] if x.dim() else 1
            following.mark(x, SampleTrace(0, max(1, rows), 0 if x.dim() else None, reduced="gradient"))


def _met(following: BatchTracer, gradients: Sequence[Any]) -> str:
    traces = (following.of(x) for x in gradients)
    return next((trace.met for trace in traces if trace is not None and trace.met), "")


def watch(hooks: Any, following: BatchTracer, notify: Notify) -> None:
    """Have hooks in this dict of torch's followed."""
    for key, hook in list((hooks or {}).items()):
        if not isinstance(hook, WatchedHook):
            hooks[key] = WatchedHook(hook, following, notify)


def watch_modules(model: nn.Module, following: BatchTracer, notify: Notify) -> None:
    """Watch the hooks on the gradients of a model's modules."""
    for module in model.modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            if hooks:
                watch(hooks, following, notify)

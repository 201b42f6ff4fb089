"""Hooks of the user's on parameters' gradients run when the gradients have met, so that they see those of the global
batch: a hook may clip, or step an optimiser.

torch calls hooks as one rank's gradient arrives. So the dicts in which torch looks for them give it a placeholder for
each hook of the user's, whenever it is put there, and keep ours as they are.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
        yield from (one.hook for one in self.values() if isinstance(one, Placeholder))


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return (getattr(function, "__module__", "") or "").startswith(_OURS)


class DeferredHooks:
    """Those of one parameter."""

    def __init__(self, p: Tensor) -> None:
        self._p, self._old = p, None
        p._backward_hooks = self._on_gradient = Hooks(p._backward_hooks)
        self._afterwards = Hooks(getattr(p, "_post_accumulate_grad_hooks", None))
        p._post_accumulate_grad_hooks = self._afterwards  # type: ignore[attr-defined]

    def there(self) -> bool:
        """Whether the user has hooks on it."""
        return any(True for each in (self._on_gradient, self._afterwards) for _ in each.users())

    def begin(self) -> None:
        """A backward begins: what earlier ones left is put aside, since hooks see the new gradient alone."""
        grad = self._p.grad
        self._old = None if grad is None else grad.detach().clone()
        self._p.grad = None

    @torch.no_grad()
    def end(self) -> None:
        """The gradients have met."""
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
    """Those on which the user has hooks, as a backward begins."""
    found = [one for one in hooks if one.there()]
    for one in found:
        one.begin()
    return found

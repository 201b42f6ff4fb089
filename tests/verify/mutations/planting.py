"""Planted bugs: what one is, and how it is put into a running rank.

A bug is one function that patches one place of the running system, with the plan under which it shows:

    @bug("dp=2", "factor_of_axis")
    def loss_by_local_tokens(patch):
        patch(EveryStepSync, "weigh", lambda self, count: 1.0 / count)

The function's name is that of the class of bug; its docstring says where such a bug was met or what it looks like.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from unisono.plan import Plan
from unisono_contrib.verify.cover import MESH

WIDE = MappingProxyType(
    {
        "model.n_layer": 3, "model.n_head": 12, "model.d_model": 24, "model.context": 12, "train.global_batch": 12
    }  # every axis may have two, three or four ranks
)  # fmt: skip
Patch = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    """plan: under which it shows. causes: names that `verify` may rightly give it. dropout: of the model. both: whether
    one device has it too. recipe: `section.key` → value, where it needs another. text: that is read, if not the usual
    one. test: the quick test that finds it, where `verify` cannot. loop: in which it shows, if that is a user's own, and
    not `train`. source: where it was really made, and silent, if it was."""

    name: str
    plan: str
    causes: tuple[str, ...]
    dropout: float
    optimizer: str
    both: bool
    recipe: Mapping[str, Any]
    text: str
    test: str
    loop: Callable[[Any], None] | None
    source: str
    plant: Callable[[Patch], None]

    @property
    def degrees(self) -> list[int]:
        """Of the axes of its plan that have more than one rank."""
        plan = Plan.parse(self.plan)
        return [size for axis in MESH if (size := getattr(plan, axis)) > 1]


def bug(
    plan: str = "",
    *causes: str,
    dropout: float = 0.1,
    optimizer: str = "adamw",
    both: bool = False,
    recipe: Mapping[str, Any] = MappingProxyType({}),
    text: str = "",
    test: str = "",
    loop: Callable[[Any], None] | None = None,
    source: str = "",
) -> Callable[[Callable[[Patch], None]], Bug]:
    """Makes a function a Bug."""
    return lambda plant: Bug(
        plant.__name__, plan, causes, dropout, optimizer, both, recipe, text, test, loop, source, plant
    )


def bugs_of(*modules: ModuleType) -> dict[str, Bug]:
    """Name → bug, for all of some modules."""
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Bug)]
    return {one.name: one for one in found}


class Planting:
    """Puts a bug in while a plan is played. Ranks on threads share what is patched: the first to come plants it, the
    first to leave, when all are through, takes it out."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    @contextmanager
    def of(self, bug: Bug | None) -> Iterator[None]:
        """While this lasts, the bug is in the system."""
        if self._stack is None:
            self._stack = ExitStack()
            if bug is not None:
                bug.plant(self._patch)
        try:
            yield
            _all_here()
        finally:
            self._stack, stack = None, self._stack
            if stack is not None:
                stack.close()
        _all_here()

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        if self._stack is not None:
            self._stack.enter_context(mock.patch.object(owner, name, new))


def _all_here() -> None:
    if dist.is_initialized():
        dist.barrier()

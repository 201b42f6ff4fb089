"""`unisono.scope`: what is made inside is mirrored over replicas on this host, as TensorFlow's MirroredStrategy does.

with unisono.scope(2) as job:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in job.deal(data):          # global batches
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.comm.device import count
from unisono.launch.context import RankContext
from unisono.launch.env import place_here
from unisono.launch.rank.beside import start_beside
from unisono.library.enter import init, is_staged
from unisono.library.exchange import spread
from unisono.library.explain import explained
from unisono.library.job import Job
from unisono.spec.errors import UsageError


@contextmanager
def scope(
    replicas: int | None = None,
    *,
    context: RankContext | None = None,
    timeout: float | None = None,
    strict: bool = False,
) -> Iterator[Job]:
    """Mirror the models made inside the block over `replicas` processes of this host; yields the job.

    Inside, random numbers are those of the first replica, so that all begin with the same weights. When the block ends,
    every model made in it is prepared: its gradients are those of the global batch, and its weights stay bit-equal on
    all replicas. Make the optimisers inside too. `job.deal(data)` yields each replica's part of a global batch.

    A script that was started alone (`python train.py`) starts the other replicas itself: the same script with the same
    arguments, whose prints are not shown. Under torchrun and other starters the replicas are their ranks. replicas: how
    many; by default as many as this host has GPUs, at least one. context, timeout, strict: as for `unisono.init`.

    Raises UsageError: J02 for a model that cannot be mirrored, J09 in a notebook, P14 for another number of ranks than
    were started; J19 at the step of an optimiser that was made elsewhere.
    """
    with explained():
        alone = context is None and not is_staged() and not dist.is_initialized() and place_here() is None
        wanted = max(1, count()) if replicas is None and alone else replicas
        if wanted is not None and wanted < 1:
            raise UsageError(f"{wanted} replicas", where="unisono.scope", fix="1 or more", code="J09")
        copies = start_beside(wanted) if alone and wanted is not None and wanted > 1 else None
        plan = "dp=-1" if wanted is None else f"dp={wanted}"
        job = init(plan, context=context, timeout=timeout, strict=strict)
        if copies is not None:
            copies.settle()
    torch.set_rng_state(job.ranks.broadcast(torch.get_rng_state()))
    with _modules_made() as modules:
        yield job
    with explained():
        _mirror(job, roots_of(modules))


@contextmanager
def _modules_made() -> Iterator[list[nn.Module]]:
    """While it lasts, the list gets every module that this thread gives a parameter or a part, each once."""
    modules, known, thread = list[nn.Module](), set[int](), threading.get_ident()

    def note(module: nn.Module, _: str, part: Any) -> None:
        if threading.get_ident() == thread and part is not None and id(module) not in known:
            known.add(id(module))
            modules.append(module)

    hooks = [
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    try:
        yield modules
    finally:
        for hook in hooks:
            hook.remove()


def roots_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those with parameters that are no part of another one, in their order."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [
        module for module in modules if id(module) not in inner and any(True for _ in module.parameters())
    ]


def _mirror(job: Job, roots: Sequence[nn.Module]) -> None:
    """Prepare models with the optimisers that step them. One that steps several makes one model of them."""
    places = {id(p): index for index, p in enumerate(p for model in roots for p in model.parameters())}
    owner = {id(p): number for number, model in enumerate(roots) for p in model.parameters()}
    # Torch tells nobody of a new optimiser. Their order must be the same on all replicas.
    every = [
        thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer) and _places(thing, places)
    ]
    optimizers = sorted(every, key=lambda optimizer: _places(optimizer, places))
    for group in _groups(
        len(roots), [sorted({owner[p] for p in _params(o) if p in owner}) for o in optimizers]
    ):
        models = [roots[number] for number in group]
        mine = [o for o in optimizers if owner.get(next(iter(_params(o) & owner.keys()))) in group]
        if mine:
            job.prepare(models[0] if len(models) == 1 else nn.ModuleList(models), mine)
        elif job.world > 1:  # frozen, or to be prepared later
            spread([*models[0].parameters(), *models[0].buffers()], job.mesh.data)

    @explained()
    def steps(optimizer: Optimizer, *_: Any) -> None:
        if job.world > 1 and not job.knows(optimizer):
            raise UsageError(
                "an optimiser steps parameters that are not mirrored, so each replica would keep its own",
                where="unisono.scope",
                fix="make the model and the optimiser inside the block, or job.prepare(model, optimizer)",
                code="J19",
            )

    register_optimizer_step_pre_hook(steps)


def _params(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _places(optimizer: Optimizer, places: Mapping[int, int]) -> list[int]:
    """The numbers of its parameters among those of the scope."""
    return sorted(places[p] for p in _params(optimizer) & places.keys())


def _groups(count: int, links: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers below `count` in groups, each with all that a link joins.

    _groups(3, [[0, 2]])   # [[0, 2], [1]]
    """
    group = list(range(count))
    for link in links:
        joined = {group[number] for number in link}
        group = [min(joined) if each in joined else each for each in group]
    return [[number for number in range(count) if group[number] == first] for first in sorted({*group})]

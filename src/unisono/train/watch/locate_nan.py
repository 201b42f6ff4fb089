"""A loss that is not a number: which layer made the first one, on which rank, and from which micro-batch? And a loss
that no untrained model has."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.config import Recipe
from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.player import Leaf
from unisono.spec.errors import UserCodeError
from unisono.train.step.run import Run
from unisono.train.step.update import Report

_MODULES = 2**20  # more than a stage has
_CLEAN = 2**40  # later than any module of any stage


def _finite(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_finite, value))
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(torch.isfinite(value).all())


def odd_loss(recipe: Recipe, classes: int, loss: float) -> str:
    """What to say of a user's model whose first loss is not about that of guessing; "" if it is. classes: that a target
    may be."""
    chance = math.log(max(classes, 1))
    if ":" not in recipe.model.kind or recipe.train.loss or not chance or 0.5 < loss / chance < 2:
        return ""
    return (
        f"the first loss is {loss:.3g} nats per target, guessing among {classes} classes gives {chance:.3g}:"
        " is the model's loss a sum over targets, not a mean, and is the model untrained?"
    )


@torch.no_grad()
def first_bad(run: Run, leaves: Sequence[Leaf]) -> tuple[int, str]:
    """(order in the model, words) of the first module on this rank whose output is not finite though its inputs are,
    going forward once more; 2^40 if there is none.

    Inner modules are done before those around them, so a stage's first hit is the innermost; what happens between
    modules, in attention or in a user's own forward, is the outer one's.
    """
    hits: dict[int, tuple[int, str]] = {}  # by stage
    names, order = {}, {}
    for index, stage in run.local.stages.items():
        for at, (name, module) in enumerate(stage.named_modules()):
            names[module], order[module] = name, (index, at)

    def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        stage, at = order[module]
        if stage not in hits and not _finite(output) and all(map(_finite, inputs)):
            weights = [n for n, p in module.named_parameters(recurse=False) if not _finite(p.detach())]
            why = f" (its {weights[0]} is not finite)" if weights else ""
            words = f"{names[module] or 'the stage'} ({type(module).__name__}){why}"
            hits[stage] = stage * _MODULES + at, words

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        run.player.play(run.eval_row, leaves, 1.0, run.seed)
    finally:
        for hook in hooks:
            hook.remove()
    return min(hits.values(), default=(_CLEAN, ""))


def locate_nan(
    run: Run, leaves: Sequence[Leaf], report: Report, rank: int, saved: str
) -> UserCodeError | None:
    """The error of the rank where the first bad number arose; None on the others, which should wait to be stopped.

    saved: the last good checkpoint. Every rank calls this together.
    """
    order, words = first_bad(run, leaves)
    key = order * run.mesh.shape.world + rank
    least = torch.tensor(key, dtype=torch.int64, device=run.local.device)
    run.mesh.world.all_reduce(least, dist.ReduceOp.MIN)
    if least.item() >= _CLEAN * run.mesh.shape.world:
        words = (
            "no layer's output: the gradient overflowed in backward"
            if report.loss == report.loss
            else "the loss itself"
        )
        if rank:
            return None
    elif least.item() != key:
        return None
    what = f"step {report.step + 1}: the loss is {report.loss}, the gradient norm {report.norm}"
    kept = f"; {saved} is kept" if saved else ""
    likely, fix = (
        "a learning rate that is too high, or bad input",
        "a lower --train.lr, more --train.warmup_steps",
    )
    if (scale := report.says.get("loss_scale")) is not None:
        what += f"; the scale of the loss has fallen to its least, {scale:g}"
        likely, fix = f"numbers beyond fp16's largest, 65504, or {likely}", f"precision=bf16, {fix}"
    return UserCodeError(
        what,
        where=f"first in {words}",
        likely=likely,
        fix=f"{fix}, or --train.clip{kept}",
        rank=rank,
        code="N01",
    )


@torch.no_grad()
def odd_leaves(run: Run, leaves: Sequence[Leaf]) -> dict[int, float]:
    """Leaves of the global batch whose loss is not a number, and that loss, going forward once more; none where a
    weight is none. Alike on all ranks: every rank calls it, or it hangs."""
    losses = run.player.play(run.eval_row, leaves, 1.0, run.seed)
    table = torch.zeros(run.of_leaves + 1, dtype=torch.float64, device=run.local.device)
    table[torch.tensor(list(run.leaves), device=table.device)] = losses[: len(run.leaves)].double()
    weights = [at_home(slot.master).detach() for slot in run.local.slots]
    table[-1] = sum(not bool(torch.isfinite(weight).all()) for weight in weights)
    *rows, spoiled = run.mesh.world.all_gather(table).view(-1, len(table)).unbind(1)
    if bool(spoiled.any()):
        return {}
    odd = {leaf: [x for x in row.tolist() if not math.isfinite(x)] for leaf, row in enumerate(rows)}
    return {leaf: values[0] for leaf, values in odd.items() if values}

"""What an optimiser such as `kfac` changes of a run: it observes linear layers."""

from collections.abc import Callable

from torch import nn

from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.train.step.run import Run
from unisono_contrib.train.optim._kfac_steps import KfacSteps
from unisono_contrib.train.step.layer_products import listen


def around(recipe: Recipe) -> Callable[[Run], Run]:
    """Has each live run observe its layers. Raises UsageError P28 for keys of `[train]` under which layers compute a
    step's micro-batches more than once, or not at all as modules."""
    train = recipe.train
    for key, on, why in (
        ("guard", train.guard > 0, "computes micro-batches twice"),
        ("compile", train.compile, "makes one graph of a block, in which layers are no modules"),
    ):
        if on:
            raise UsageError(
                f"train.{key} {why}, and optimizer={train.optimizer} observes what passes linear layers",
                where=f"train.{key}, train.optimizer",
                fix=f"leave train.{key} out, or --train.optimizer soap",
                code="P28",
            )
    return _observed


def _observed(run: Run) -> Run:
    for part in getattr(run.update.optimizer, "parts", (run.update.optimizer,)):
        if isinstance(part, KfacSteps):
            params: list[nn.Parameter] = [p for group in part.param_groups for p in group["params"]]
            part.products = listen(run, params, part.edge, part.every)
    return run

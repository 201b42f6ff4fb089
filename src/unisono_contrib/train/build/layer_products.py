"""What an optimiser such as `kfac` changes of a run: linear layers are observed."""

from torch import nn

from unisono.train.step.run import Run
from unisono_contrib.train.optim._kfac_steps import KfacSteps
from unisono_contrib.train.step.layer_products import listen


def observe(run: Run) -> Run:
    """The run, whose layers are observed from now on. Every rank of a stage calls it, or it hangs."""
    for part in getattr(run.update.optimizer, "parts", (run.update.optimizer,)):
        if isinstance(part, KfacSteps):
            params: list[nn.Parameter] = [p for group in part.param_groups for p in group["params"]]
            part.products = listen(run, params, part.edges, part.every)
    return run

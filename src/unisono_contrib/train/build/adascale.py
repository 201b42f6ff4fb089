"""What `optimizer = "adascale"` changes of a run: its learning rate, by what the run measures."""

from collections.abc import Callable
from functools import partial

from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.spec.training import RATES
from unisono.train.step.run import Run
from unisono_contrib.config.sections.noise_scale import computed_otherwise
from unisono_contrib.train.build.noise_scale import need_two
from unisono_contrib.train.optim.adascale import AdaScale
from unisono_contrib.train.step.adascale import ScaledRate
from unisono_contrib.train.step.noise_scale import NoiseScale


def around(recipe: Recipe) -> Callable[[Run], Run]:
    """A rate for each live run. Raises UsageError C06 for keys that contradict each other, P44 where no micro-batch has
    one gradient."""
    train, chosen = recipe.train, recipe.train.optimiser()
    if not isinstance(chosen, AdaScale):
        raise TypeError(f"optimizer={chosen.name} is not adascale")
    for problem in computed_otherwise(recipe, "train.optimizer"):
        raise UsageError(problem.what, where=problem.where, fix=problem.fix, code=problem.code)
    batch = chosen.adascale_batch or train.micro_batch or 1
    if train.global_batch < batch:
        raise UsageError(
            f"a step of {train.global_batch} samples is smaller than the batch of {batch} that lr is meant for",
            where="train.global_batch, train.adascale_batch",
            fix=f"--train.adascale_batch {train.global_batch}",
            code="C06",
        )
    if train.lr_scaling != "none":
        raise UsageError(
            f"lr_scaling={train.lr_scaling} scales lr to the batch, and optimizer=adascale would do so again",
            where="train.lr_scaling, train.optimizer",
            fix="--train.lr_scaling none",
            code="C06",
        )
    if train.global_batch > batch:
        need_two(train.global_batch, train.micro_batch or 1, "train.optimizer")
    steps = chosen.adascale_steps or train.steps
    base = partial(RATES.among(train.lr_schedule, dict(train)).at, steps=steps, lr=train.peak_lr)
    return ScaledRate(NoiseScale(chosen.adascale_smoothing), batch, steps, base).attach

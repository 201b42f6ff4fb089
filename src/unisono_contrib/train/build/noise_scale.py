"""What `[noise_scale]` of a recipe changes of a run: it measures, and tells."""

from collections.abc import Callable

from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus
from unisono.train.step.run import Run
from unisono_contrib.config.sections.noise_scale import NoiseScaleConfig
from unisono_contrib.config.sections.ramp import RampConfig
from unisono_contrib.train.step.noise_scale import NoiseScale


def around(section: NoiseScaleConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """Measures each step. Raises UsageError C06 where a step is one micro-batch, of which nothing can be learned."""
    train = recipe.train
    ramp = getattr(recipe, "ramp", None)
    # Both measure by themselves, and tell.
    if train.optimiser().paced or (isinstance(ramp, RampConfig) and ramp.measured):
        return lambda run: run
    need_two(train.global_batch, train.micro_batch or 1, "noise_scale")
    return NoiseScale(section.smoothing).attach


def need_two(global_batch: int, micro_batch: int, where: str) -> None:
    """Raises UsageError C06 for a step of one micro-batch. where: the key that compares several."""
    if global_batch < 2 * micro_batch:
        raise UsageError(
            f"a step of {global_batch} samples is one micro-batch, whose gradient can be compared with no other",
            where=f"train.micro_batch, {where}",
            fix=f"--train.micro_batch {max(1, global_batch // 2)}",
            code="C06",
        )

"""Engines beside torch: each computes the steps of a proof by code of its own, from the same weights and samples.

A member is a folder. Its declaration says what it can play, and imports neither the engine's library nor torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from unisono.config import Resolved
from unisono.models.gpt import GPTConfig
from unisono.plan.fidelity import fidelity_of, with_sections
from unisono.plan.fields import USUAL
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity

_SAME = frozenset({"callbacks", "early_stopping", "ema", "job", "k8s", "network", "slurm"})
"""Sections of a recipe that change no gradient."""
_UPDATES = ("adamw", "sgd")
_SYNCS = ("every_step", "canonical")


class StepEngine(Member, ABC):
    """What plays a recipe's steps without torch. spreads: it plays plans too, not only one device. library: the package
    that it needs, an extra of that name; "" for none."""

    spreads: ClassVar[bool] = False
    library: ClassVar[str] = ""

    @abstractmethod
    def problem(self, resolved: Resolved) -> str:
        """Why it cannot play this plan of this recipe, or be compared with torch under it; "" where it can."""

    @abstractmethod
    def play(self, question: Path, resolved: Resolved, out: Path) -> None:
        """Compute what `export.py` laid into `question`, and write `step-K.safetensors` into `out`, a file a step or
        several that add up: `loss` [1], and `raw/NAME` for each weight. Raises UnisonoError where the engine fails."""


ENGINES: Family[StepEngine] = Family(
    "engine", "unisono_contrib.verify.engines", StepEngine, "--engine", ("V07", "V07"), folders=True
)


def beyond_engines(resolved: Resolved) -> str:
    """What of a recipe, or of a plan's arithmetic, is torch's alone, so that no engine's numbers can be held against
    it; "" where there is nothing."""
    return next(_unknown(resolved), "")


def _unknown(resolved: Resolved) -> Iterator[str]:
    recipe, plan = resolved.recipe, resolved.plan
    model, train = recipe.model, recipe.train
    if type(model) is not GPTConfig:
        yield f"a model of kind {model.kind}: only gpt is written for it"
    elif model.dropout:
        yield f"model.dropout {model.dropout:g}: the masks are torch's"
    elif model.weights:
        yield "model.weights: it begins from the weights that the seed draws"
    if train.optimizer not in _UPDATES:
        yield f"train.optimizer {train.optimizer}: only {' and '.join(_UPDATES)} are written for it"
    for key, off in (("loss", None), ("lora_rank", 0), ("freeze", ()), ("train_only", ())):
        if getattr(train, key) != off:
            yield f"train.{key}: it computes the model's own loss, and the gradients of all weights"
    if recipe.data.packing == "documents":
        yield "data.packing documents: its windows are cut from one stream"
    for section in recipe.sections():
        if section.name not in _SAME:
            yield f"[{section.name}], which changes what a step computes"
    if train.dtype != "float64" or plan.text("precision") != "fp64":
        yield f"precision {plan.text('precision')}: engines are compared to 1e-12, in float64"
    if plan.sync.partition(":")[0] not in _SYNCS:
        yield f"sync={plan.sync}: only {' and '.join(_SYNCS)} have a gradient of one device in each step"
    if with_sections(fidelity_of(plan), plan, recipe.sections()) is Fidelity.LOSSY:
        yield f"{_lossy(resolved)}: a plan that loses something is held to a bound of its own, not to 1e-12"


def _lossy(resolved: Resolved) -> str:
    plan = resolved.plan
    if plan.codec != USUAL.codec:
        return f"codec={plan.codec}"
    return f"zero={plan.text('zero')} schedule={plan.schedule}"

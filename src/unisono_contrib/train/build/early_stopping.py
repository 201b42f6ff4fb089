"""What `[early_stopping]` of a recipe adds to a run: the best value so far, kept in its state, and who judges."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus
from unisono.train.state.validation_verdict import ValidationVerdict
from unisono.train.step.run import Run
from unisono_contrib.config.sections.early_stopping import EarlyStoppingConfig

KEYS = ("early_stopping_best", "early_stopping_step", "early_stopping_waited")


def around(section: EarlyStoppingConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """The run keeps the best value, its step, and the validations since, in checkpoints and snapshots."""

    def with_best(run: Run) -> Run:
        kept = {key: run.update.keeps.get(key) for key in KEYS}
        for key, begin in zip(KEYS, (math.nan, 0.0, 0.0), strict=True):
            if kept[key] is None:
                kept[key] = torch.tensor(begin, dtype=torch.float64, device=run.local.device)
        run.update = replace(run.update, keeps={**run.update.keeps, **kept})
        return run

    return with_best


def judge(section: EarlyStoppingConfig, run: Run, values: Mapping[str, float]) -> ValidationVerdict:
    """Judge a validation. values: its numbers by name, without `val_`. What rank 0 has counts for all, since a user's
    own function may say other numbers elsewhere. Every rank calls it, or it hangs. Raises UsageError C06 where the
    metric is not among them."""
    name = section.metric.removeprefix("val_")
    if name not in values:
        raise UsageError(
            f"early_stopping.metric = {section.metric}: the validation counted {', '.join(sorted(values))}",
            where="early_stopping.metric", fix="one of these, with val_ before it", code="C06",
        )  # fmt: skip
    best, at, waited = (run.update.keeps[key] for key in KEYS)
    seen = torch.tensor([values[name]], dtype=torch.float64, device=best.device)
    value = float(run.mesh.world.broadcast(seen))
    if section.is_better(value, float(best)):
        best.fill_(value)
        at.fill_(run.step)
        waited.zero_()
    else:
        waited.add_(1.0)
    return judged(section, run)


def judged(section: EarlyStoppingConfig, run: Run) -> ValidationVerdict:
    """What is thought of the validations so far, also where the run was resumed, or put back, after them."""
    best, at, waited = (float(run.update.keeps[key]) for key in KEYS)
    enough = ""
    if section.patience and waited >= section.patience:
        since = f"{waited:.0f} validation{'s' * (waited > 1)} since"
        enough = f"early stopping: {section.metric} was best at step {at:.0f}, {best:.6g}, and in no {since}"
    return ValidationVerdict(int(at), enough)

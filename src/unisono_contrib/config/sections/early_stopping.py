"""`[early_stopping]`: end a run that gains nothing any more, and keep its best checkpoint."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem, UsageError
from unisono.spec.section import Section
from unisono.spec.training import METRICS, NotNegative


class EarlyStoppingConfig(Section):
    """Judge each validation by one number. The checkpoint of the best one is kept, and a run ends when so many
    validations have brought no better one (Prechelt, "Early stopping - but when?", 1998)."""

    name: ClassVar[str] = "early_stopping"
    one_run: ClassVar[bool] = True

    metric: str = Field(
        default="val_loss",
        pattern=r"^val_\w+$",
        description="val_loss, or val_NAME of a metric of train.metrics or of a number of train.evaluate",
    )
    mode: Literal["min", "max"] = Field(default="min", description="whether less is better, or more")
    patience: int = Field(
        default=3,
        ge=0,
        description="validations without a better one after which the run ends; 0: never, the best is kept alone",
    )
    min_delta: NotNegative = Field(default=0.0, description="by how much a better value is better at least")

    def is_better(self, value: float, best: float) -> bool:
        """Whether `value` is better than the best one so far, which is NaN before the first. NaN is never better."""
        if math.isnan(best):
            return not math.isnan(value)
        return best - value > self.min_delta if self.mode == "min" else value - best > self.min_delta

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        train, counted = recipe.train, self.metric.removeprefix("val_")
        if not train.eval_every:
            what = "early_stopping judges validations, and train.eval_every = 0 makes none before the end"
            yield Problem("C06", what, "train.eval_every, early_stopping", "--train.eval_every 100")
        names = ["loss"]
        with suppress(UsageError):  # a metric that is none is told by [train]
            names += [METRICS.read(text).name for text in train.metrics]
        if counted not in names and train.evaluate is None:
            said = ", ".join(f"val_{name}" for name in names)
            what = f"early_stopping.metric = {self.metric}: a validation counts {said}"
            fix = f'--train.metrics {counted}, or metric = "{said.partition(",")[0]}"'
            yield Problem("C06", what, "early_stopping.metric, train.metrics", fix)

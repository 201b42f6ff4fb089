"""What the planner thinks of a change to a run that was: its step's price over that of today's plan. No torch."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from unisono import config
from unisono.config import Loaded
from unisono.plan.checks import batch_of
from unisono.planner import predict
from unisono.planner.from_recipe import serving
from unisono.planner.request import PlanRequest
from unisono.planner.simulate import rate
from unisono.report.verdict.evidence import Prices
from unisono.spec.errors import UnisonoError
from unisono.spec.runs import CONFIG
from unisono.verbs._sizes import model_of


def prices_of(run_dir: Path, environ: Mapping[str, str]) -> Prices:
    """Prices of changes to this run, on this machine as `predict.here` has it. A change without a price is None."""

    def price(change: str) -> float | None:
        try:
            before, after = (
                _seconds_a_sample(_loaded(run_dir, flags, environ), environ) for flags in ("", change)
            )
        except UnisonoError:
            return None
        return after / before if before and after else None

    return price


def _loaded(run_dir: Path, change: str, environ: Mapping[str, str]) -> Loaded:
    flags, _ = config.split_flags(shlex.split(change), top=("plan",))
    return config.load(str(run_dir / CONFIG), flags, environ=environ)


def _seconds_a_sample(got: Loaded, environ: Mapping[str, str]) -> float | None:
    """None for models that would have to be traced, and for a change that leaves the recipe without a batch."""
    batch, _ = batch_of(got.plan, got.recipe.train)
    if batch is None or ".py:" in got.recipe.model.kind or got.recipe.model.kind.startswith("hf:"):
        return None
    where, stack, _ = predict.here(environ)
    where = predict.roomy(serving(where, got.recipe), got.plan.world)
    ask = PlanRequest(model_of(got, environ), got.plan, where, stack, batch.micro_batch, batch.micros)
    return 1.0 / rate(ask)

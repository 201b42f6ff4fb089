"""What a run is expected to take, kept in its folder for the report. Whatever comes of it, the run goes on."""

import json
from collections.abc import Mapping

from unisono.config import Loaded, Recipe
from unisono.plan import Plan
from unisono.plan.checks import batch_of
from unisono.spec.errors import UsageError


def expected(recipe: Recipe, plan: Plan, environ: Mapping[str, str]) -> str | None:
    """The text of `prediction.json` for a resolved recipe and plan; None for a model that cannot be priced."""
    # Imported here: `train` needs them only while the ranks are importing torch.
    from unisono.planner import predict
    from unisono.verbs._sizes import model_of

    batch, _ = batch_of(plan, recipe.train)
    if batch is None or ".py:" in recipe.model.kind or recipe.model.kind.startswith("hf:"):
        return None  # to know these in numbers could take torch, which the process that watches the ranks never imports
    try:
        model = model_of(Loaded(recipe, plan, {}), environ)
    except UsageError:
        return None
    try:
        where, made, calibrated = predict.here(environ)
        got = predict.predict(model, plan, where, made, micro_batch=batch.micro_batch, micros=batch.micros)
        told = predict.as_json(got, calibrated)
    except UsageError as error:
        told = {"schema_version": 1, "problem": f"{error.where}: {error.what}" if error.where else error.what}
    except Exception as error:  # a price is no reason to stop a run: its report says that there was none
        told = {"schema_version": 1, "problem": repr(error)}
    return json.dumps(told, indent=1)

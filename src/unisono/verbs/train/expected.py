"""What a run is expected to take, kept in its folder for the report. Whatever comes of it, the run goes on."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from unisono.config import Loaded, Recipe
from unisono.plan import Plan
from unisono.plan.checks import batch_of
from unisono.spec.errors import Infeasible, UsageError

_SHARED = 512.0
"""MiB of a rank that may be Python's and torch's own, which forked ranks share."""


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
        where, stack, calibrated = predict.here(environ)
        got = predict.predict(model, plan, where, stack, micro_batch=batch.micro_batch, micros=batch.micros)
        prediction = predict.as_json(got, calibrated)
    except UsageError as error:
        prediction = {
            "schema_version": 1,
            "problem": f"{error.where}: {error.what}" if error.where else error.what,
        }
    except Exception as error:  # a price is no reason to stop a run: its report says that there was none
        prediction = {"schema_version": 1, "problem": repr(error)}
    return json.dumps(prediction, indent=1)


def require_room(prediction: str | None, ranks: int) -> None:
    """Raises Infeasible where the ranks together would need more than twice the memory of this host: the kernel would
    end them minutes later, or another program for them. Where there are GPUs, the ranks' memory is theirs."""
    numbers = json.loads(prediction or "{}")
    mib = max(0.0, numbers.get("mem_mib", 0.0) - _SHARED)
    need = mib * ranks / 1024
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if need > 2 * have and not has_gpus():
        raise Infeasible(
            f"the ranks need about {need:.3g} GiB together, this machine has {have:.3g}",
            where="model, train.micro_batch, plan",
            likely="a model or a batch that is too large, or a slip of the finger",
            fix="a smaller model or --train.micro_batch; unisono simulate says what takes the memory",
        )


def has_gpus() -> bool:
    """Whether the ranks' memory is that of GPUs, as far as one sees without torch."""
    return Path("/dev/nvidiactl").exists()

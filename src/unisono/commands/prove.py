"""`unisono.prove`: a user's model under a plan of ours, beside one device."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.commands import proof
from unisono.commands.proof import Proof
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.library.explain import explained
from unisono.plan import Plan
from unisono.spec.errors import UsageError

_IMPORTED = "unisono_model_"  # what a model's file is called when ranks import it


@explained()
def prove(
    model: Callable[..., Any] | str, plan: Plan | str, recipe: Recipe | None = None, steps: int = 3
) -> Proof:
    """Whether `model` under `plan` computes what it computes on one device: loss, gradients, parameters, moments.

    model: a function at the top of a file that returns a torch.nn.Module, or "FILE.py:FUNCTION"; see `model.kind`. It
    may take any of config, vocab, context, classes, sample_shape. recipe: data, batch and optimiser; by default
    characters of Python's library, eight samples of 32 a step, float64, AdamW. steps: how many to prove.

    Raises UsageError, V03 for a function that other processes cannot find, and what else `unisono verify` raises.
    """
    default = Recipe(
        model=ModelConfig(context=32),
        data=DataConfig(),
        train=TrainConfig(global_batch=8, micro_batch=1, dtype="float64"),
    )
    given = recipe or default
    kind = model if isinstance(model, str) else _kind(model)
    whole = given.model_copy(update={"model": given.model.model_copy(update={"kind": kind})})
    asked = plan if isinstance(plan, Plan) else Plan.parse(plan)
    (found,) = proof.prove(whole, [resolve(whole, asked).plan], steps)
    return found


def _kind(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if module.startswith(_IMPORTED):
        raise UsageError(
            "prove was called while its own processes import the script",
            where="unisono.prove",
            fix="put the call under: if __name__ == '__main__':",
            code="V03",
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if not name.isidentifier() or file is None or not Path(file).exists():
        raise UsageError(
            f"{name or function!r} cannot be found by another process",
            where="unisono.prove",
            fix="a function at the top of a file, neither a lambda nor inside another function",
            code="V03",
        )
    return f"{Path(file).resolve()}:{name}"

"""`unisono.prove`: a user's model, or a user's own loop, under a plan of ours, beside one device."""

import inspect
from collections.abc import Callable
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.library.explain import explained
from unisono.library.gradient_check import locate
from unisono.library.loop_check import LoopVerdict, prove_loop
from unisono.plan import Plan
from unisono.verify import prover as proof
from unisono.verify.prover import Proof

_IMPORTED = "unisono_model_"  # what a model's file is called when ranks import it


@explained()
def prove(
    model: Callable[..., Any] | str, plan: Plan | str, recipe: Recipe | None = None, steps: int = 3
) -> Proof | LoopVerdict:
    """Compare a model, or a training loop, under a plan with one device. The verdict is true if nothing differs.

    A model is compared in loss, gradients, parameters and optimiser state. A loop is a function with a parameter `job`
    that calls `job.prepare` and trains. It is run by one process and by the ranks of the plan, and the gradients of its
    first steps are compared.

    model: a module-level function that returns a torch.nn.Module and may take any of config, vocab, context, classes
    and sample_shape; or "FILE.py:FUNCTION"; or a loop. plan: "dp=2 tp=2", for a loop only `dp` and `shard`. recipe:
    data, batch and optimiser of a model; by default characters of Python's library, eight samples of 32 per step,
    float64, AdamW. steps: how many to compare.

    Raises UsageError V03 for a function that other processes cannot find, and the errors of `unisono verify`.
    """
    wanted = plan if isinstance(plan, Plan) else Plan.parse(plan)
    if callable(model) and "job" in inspect.signature(model).parameters:
        return prove_loop(model, wanted, steps)
    default = Recipe(
        model=ModelConfig(context=32),
        data=DataConfig(),
        train=TrainConfig(global_batch=8, micro_batch=1, dtype="float64"),
    )
    base = recipe or default
    kind = model
    if not isinstance(kind, str):
        file, name = locate(kind, "unisono.prove", _IMPORTED)
        kind = f"{file}:{name}"
    model_config = ModelConfig(**base.model.model_dump(exclude_unset=True) | {"kind": kind})
    whole = base.model_copy(update={"model": model_config})
    (result,) = proof.prove(whole, [resolve(whole, wanted).plan], steps)
    return result

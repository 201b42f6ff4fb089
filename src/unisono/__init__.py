"""Unisono: train deep-learning models on many devices, computing what one device would compute.

job = unisono.init(plan="dp=2")                                      the user's own loop
model, optimizer, data = job.prepare(model, optimizer, data)

with unisono.scope(2) as job: ...                                    the same on replicas that the script starts itself

def recipe() -> tuple[unisono.Recipe, unisono.Plan]: ...             a recipe in Python, for `unisono train`

unisono.notebook_launch(train, 0.1, ranks=2)                         a function of a notebook's cell on processes

unisono.prove(model_function, "dp=2")                                is my model under it what it is on one device?
unisono.prove(loop, "dp=2")                                          is my own loop, a function of job?
unisono.check_gradients(one_device, parallel, ranks=2)               is my own parallel loop?
unisono.check_stack("deepspeed", MyStep, ranks=2)                    is my step on another stack?
unisono.check_updates(MyStep, my_loop, ranks=2)                      and the weights that any loop comes to?
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.config import DataConfig, LaunchConfig, ModelConfig, OutConfig, Recipe, TrainConfig
    from unisono.library import Job, init
    from unisono.library.gradient_check import check_gradients, gradients_of
    from unisono.library.notebook import notebook_launch
    from unisono.library.prove import prove
    from unisono.library.scope import scope
    from unisono.library.stacks import TrainingStep, check_stack, check_updates
    from unisono.library.trainer import trainer
    from unisono.plan import Plan
    from unisono.spec.errors import UnisonoError

__version__ = "0.1.0"

__all__ = [
    "DataConfig",
    "Job",
    "LaunchConfig",
    "ModelConfig",
    "OutConfig",
    "Plan",
    "Recipe",
    "TrainConfig",
    "TrainingStep",
    "UnisonoError",
    "__version__",
    "check_gradients",
    "check_stack",
    "check_updates",
    "gradients_of",
    "init",
    "notebook_launch",
    "prove",
    "scope",
    "trainer",
]

# Nothing is imported before it is asked for: the command line answers without torch, plans without pydantic.
_HOMES = {
    **dict.fromkeys(
        ("DataConfig", "LaunchConfig", "ModelConfig", "OutConfig", "Recipe", "TrainConfig"), "unisono.config"
    ),
    **dict.fromkeys(("Job", "init"), "unisono.library"),
    **dict.fromkeys(("check_gradients", "gradients_of"), "unisono.library.gradient_check"),
    **dict.fromkeys(("TrainingStep", "check_stack", "check_updates"), "unisono.library.stacks"),
    "notebook_launch": "unisono.library.notebook",
    "prove": "unisono.library.prove",
    "scope": "unisono.library.scope",
    "trainer": "unisono.library.trainer",
    "Plan": "unisono.plan",
    "UnisonoError": "unisono.spec.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What processes of `check_stack` and `check_updates` run: a stack, a loop, one device, or the search for a cause."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from unisono.launch.context import RankContext
from unisono.library import proof_rank
from unisono.library.gradient_check import plain_name
from unisono.spec.errors import UserCodeError
from unisono_contrib.library.stacks._adapter import stack_named
from unisono_contrib.library.stacks._cause import cause_of_update
from unisono_contrib.library.stacks._one_device import alone
from unisono_contrib.library.stacks._step import StackPlace, TrainingStep
from unisono_contrib.library.stacks._watch import SeenStep, copied

ENTRY = "unisono_contrib.library.stacks._rank:main"


def prepare(argument: dict[str, Any]) -> dict[str, Any]:
    """In the fork server: the user's class and function, found again where they were defined, and the stack's library,
    which takes seconds to import."""
    if argument["stack"]:
        import_module(stack_named(argument["stack"]).library)
    homes = {role: argument[role] for role in ("step", "loop") if argument.get(role)}
    users: dict[str, Any] = {role: proof_rank.prepare(home) for role, home in homes.items()}
    return {role: partial(user, **homes[role].get("keys", {})) for role, user in users.items()}


def main(ctx: RankContext, argument: dict[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Do this process's part. Returns what fits into JSON; tensors go to the folder."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, argument["dtype"]))
    step: TrainingStep = user["step"]()
    if argument["role"] == "one device":
        return (
            stack_named(argument["stack"]).alone(step, argument)
            if argument["stack"]
            else alone(step, argument)
        )
    if argument["role"] == "cause":
        cause = cause_of_update(step, argument)
        return {"cause": cause.name, "text": cause.text}
    if not dist.is_initialized():
        dist.init_process_group(ctx.backend, store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    if argument["role"] == "loop":
        return _loop(ctx, argument, user["loop"])
    kind = stack_named(argument["stack"])
    place = StackPlace(
        ctx.rank, ctx.world, argument["groups"], argument["micros"], argument["options"], step.clip
    )
    seen = kind(step, place).play(argument["steps"])
    for number, each in enumerate(seen[: argument["steps"]]):
        _keep(argument, ctx.rank, number, each)
    return {
        "steps": len(seen),
        "first": 0,
        "calls": [max(each.calls.values(), default=0) for each in seen],
        "gradients": [bool(each.gradients) for each in seen],
    }


def _keep(argument: dict[str, Any], rank: int, number: int, seen: SeenStep) -> None:
    folder = Path(argument["folder"])
    save_file(seen.gradients, folder / f"grad-{rank}-{number}")
    save_file(seen.weights, folder / f"weight-{rank}-{number}")


def _loop(ctx: RankContext, argument: dict[str, Any], loop: Callable[[RankContext], Any]) -> dict[str, Any]:
    """A user's own loop: what it returns are weights."""
    returned = loop(ctx)
    weights: list[Any] = list(returned) if isinstance(returned, Sequence) else [returned]
    first = argument["steps"] - len(weights)  # one mapping alone is what the last step came to
    for number, each in enumerate(weights, first):
        if not isinstance(each, Mapping) or not all(isinstance(x, Tensor) for x in each.values()):
            text = f"{argument['loop']['name']} returned {type(each).__name__}, not a mapping from names to weights"
            raise UserCodeError(text, code="R01")
        _keep(
            argument, ctx.rank, number, SeenStep({}, {plain_name(str(k)): copied(x) for k, x in each.items()})
        )
    return {"steps": argument["steps"], "first": first, "calls": [], "gradients": [False] * argument["steps"]}

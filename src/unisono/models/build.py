"""From a recipe's `[model]` to a module."""

import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from unisono.models import noise
from unisono.models.chain import Chain
from unisono.models.plain import UserModel, kept_whole, one_input
from unisono.spec.errors import UsageError, UserCodeError
from unisono.spec.finder import executed, sister
from unisono.spec.frames import of_user
from unisono.spec.model import Facts, ModelConfig, OwnModel
from unisono.spec.training import LOSSES


def build(
    config: ModelConfig,
    facts: Facts,
    device: torch.device | str = "meta",
    seed: int = 0,
    loss: str | None = None,
    whole: str = "",
) -> nn.Module:
    """The model of a recipe, uninitialised (on the meta device it costs nothing); a user's model as it was made,
    from torch's generator seeded with `seed`. loss: a member of LOSSES in the place of the model's own.
    whole: why a plain module is not to be cut along its graph.

    Raises UsageError where the recipe and the data leave a size open, UserCodeError if a user's function raises.
    """
    if isinstance(config, OwnModel):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = user_model(config, config.sized(facts))
            sample = _sample(config, config.sized(facts))
            if isinstance(model, UserModel) and sample is not None:
                model = cut_or_whole(model, sample, whole)
    else:
        with torch.device(device):
            model = config.build(facts)
    if loss is not None:
        model.loss = LOSSES.read(loss).bind()  # type: ignore[assignment]
        model.anatomy = replace(model.anatomy, cross_entropy=False)  # type: ignore[arg-type]
    noise.name_sites(model)
    return model


def cut_or_whole(model: UserModel, sample: Tensor, whole: str = "") -> Chain:
    """A user's module as a chain along its graph, or as it is, with the reason. sample: an input of one sample,
    [1, ...]. whole: why it is not to be cut."""
    cutting = sister("unisono.models.cutting")
    if whole or cutting is None:
        return kept_whole(model, whole or "what cuts a graph is not installed")
    return cutting.cut_model(model, sample)


def _sample(config: ModelConfig, facts: Facts) -> Tensor | None:
    """An input of one sample of a user's model, [1, ...]; None where nobody has said what it is."""
    shape = facts.sample_shape or ((config.window,) if config.window else None)
    if shape is None or facts.rows is not None:
        return None
    return torch.zeros((1, *shape), dtype=torch.float32 if facts.vocab is None else torch.int64)


def _defined(module: ModuleType | None, name: str, path: str) -> str:
    """Where a function of a user's file begins."""
    code = getattr(getattr(module, name, None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {name}" if code else path


def user_model(config: ModelConfig, facts: Facts) -> nn.Module:
    """Calls FUNCTION of FILE.py with those of (config, vocab, context, classes, sample_shape) that it names."""
    path, _, name = config.kind.rpartition(":")
    known = {
        "config": config,
        "vocab": facts.vocab,
        "context": getattr(config, "context", None),
        "classes": facts.classes,
        "sample_shape": facts.sample_shape,
    }
    module = None
    try:
        module = executed(path, f"unisono_model_{Path(path).stem}", "model.kind")
        function = getattr(module, name)
        wanted = inspect.signature(function).parameters
        module_of_user = function(**{key: value for key, value in known.items() if key in wanted})
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise of_user(error, "the model function", _defined(module, name, path)) from error
    if not isinstance(module_of_user, nn.Module):
        raise UserCodeError(
            f"{name} returned {type(module_of_user).__name__}, not a torch.nn.Module",
            where=_defined(module, name, path),
            fix=f"return a torch.nn.Module from {name}",
        )
    return (
        module_of_user
        if all(hasattr(module_of_user, part) for part in ("stem", "blocks", "head"))
        else UserModel(one_input(module_of_user))
    )

"""From a recipe's `[model]` to a module."""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from unisono.models import noise
from unisono.models.chain import Chain, summed_cross_entropy
from unisono.models.noise import Noise
from unisono.spec.errors import UsageError, UserCodeError
from unisono.spec.finder import executed
from unisono.spec.frames import of_user
from unisono.spec.layout import Anatomy
from unisono.spec.model import Facts, ModelConfig, OwnModel
from unisono.spec.training import LOSSES


class WholeModule(nn.Module):
    """A user's module without parts: all of it is the stem. Only dp and shard can spread it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._noisy = "noise" in inspect.signature(module.forward).parameters

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        y = self.module(x, noise=noise) if self._noisy else self.module(x)
        if not isinstance(y, Tensor):
            raise UserCodeError(
                f"the model's forward returned {type(y).__name__}, not a tensor",
                where=_forward(self.module),
                fix="return the scores of every target: [batch, ..., classes]",
            )
        return (
            y.clone() if y._is_view() else y
        )  # FSDP2 hooks its outputs, and a view may be written to behind it


class UserModel(Chain):
    """Gives a user's module the three parts that the house expects, of which two are empty."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(WholeModule(module), nn.ModuleList(), nn.Identity(), Anatomy())
        self.loss = getattr(module, "loss", partial(_told_cross_entropy, _forward(module)))


def _told_cross_entropy(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """The same, of a user's model: scores that do not fit the targets are told with the model's place."""
    if logits.shape[:-1] == targets.shape:
        try:
            return summed_cross_entropy(logits, targets)
        except (IndexError, RuntimeError) as error:
            if int(targets.max()) < logits.shape[-1]:
                raise
            what = f"a target is {int(targets.max())}, and the model scores {logits.shape[-1]} classes"
            fix = "a last layer of `vocab` or `classes` outputs, which the model function is given by these names"
            raise UserCodeError(what, where=where, fix=fix) from error
    raise UserCodeError(
        f"the model's scores are {list(logits.shape)}, for targets {list(targets.shape)}",
        where=where,
        fix=f"scores of shape {[*targets.shape, 'classes']}".replace("'", "")
        + ", or a `loss` of the model's own",
    )


def _forward(module: nn.Module) -> str:
    """Where a user's module says what it does."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in forward" if code else type(module).__name__


def build(
    config: ModelConfig,
    facts: Facts,
    device: torch.device | str = "meta",
    seed: int = 0,
    loss: str | None = None,
) -> nn.Module:
    """The model of a recipe, uninitialised (on the meta device it costs nothing); a user's model as it was made,
    from torch's generator seeded with `seed`. loss: a member of LOSSES in the place of the model's own.

    Raises UsageError where the recipe and the data leave a size open, UserCodeError if a user's function raises.
    """
    if isinstance(config, OwnModel):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = user_model(config, config.sized(facts))
    else:
        with torch.device(device):
            model = config.build(facts)
    if loss is not None:
        model.loss = LOSSES.read(loss).bind()  # type: ignore[assignment]
        model.anatomy = replace(model.anatomy, cross_entropy=False)  # type: ignore[arg-type]
    noise.name_sites(model)
    return model


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
        made = function(**{key: value for key, value in known.items() if key in wanted})
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise of_user(error, "the model function", _defined(module, name, path)) from error
    if not isinstance(made, nn.Module):
        raise UserCodeError(
            f"{name} returned {type(made).__name__}, not a torch.nn.Module",
            where=_defined(module, name, path),
            fix=f"return a torch.nn.Module from {name}",
        )
    return made if all(hasattr(made, part) for part in ("stem", "blocks", "head")) else UserModel(made)

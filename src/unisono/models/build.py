"""From a recipe's `[model]` to a module."""

import importlib.util
import inspect
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models import noise
from unisono.models.noise import Noise
from unisono.spec.errors import UsageError, UserCodeError
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
        return (
            y.clone() if y._is_view() else y
        )  # FSDP2 hooks its outputs, and a view may be written to behind it


class UserModel(nn.Module):
    """Gives a user's module the three parts that the house expects, of which two are empty."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = WholeModule(module), nn.ModuleList(), nn.Identity()
        self.loss = getattr(module, "loss", summed_cross_entropy)
        self.anatomy = Anatomy()

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        return self.stem(x, noise)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over all targets; logits [..., V], targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


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


def user_model(config: ModelConfig, facts: Facts) -> nn.Module:
    """Calls FUNCTION of FILE.py with those of (config, vocab, context, classes, sample_shape) that it names."""
    path, _, name = config.kind.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"unisono_model_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UsageError(f"no such file: {path}", where="model.kind", fix="check the path", code="C03")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    known = {
        "config": config,
        "vocab": facts.vocab,
        "context": getattr(config, "context", None),
        "classes": facts.classes,
        "sample_shape": facts.sample_shape,
    }
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name)
        wanted = inspect.signature(function).parameters
        made = function(**{key: value for key, value in known.items() if key in wanted})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserCodeError(
            f"the model function raised {type(error).__name__}: {error}",
            where=f"{last.filename}:{last.lineno}",
        ) from error
    if not isinstance(made, nn.Module):
        raise UserCodeError(
            f"{name} returned {type(made).__name__}, not a torch.nn.Module", where=config.kind
        )
    return made if all(hasattr(made, part) for part in ("stem", "blocks", "head")) else UserModel(made)

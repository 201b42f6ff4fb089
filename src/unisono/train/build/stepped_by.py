"""Which optimiser steps which parameters of a model, where there are several."""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from unisono.config import TrainConfig
from unisono.models.cut_chain import InferredChain
from unisono.models.plain import UserModel
from unisono.spec.errors import UsageError


def stepped_by(train: TrainConfig, model: nn.Module) -> list[str]:
    """A line about which parameters are whose, none where one optimiser steps all. Raises UsageError P28 where the
    chosen one would step none, or cannot tell matrices inside the model from embeddings."""
    chosen = train.optimiser()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {name: chosen.for_parameter(name, tuple(p.shape)).name for name, p in learning.items()}
    tensors, weights = Counter(names.values()), Counter[str]()
    for name, p in learning.items():
        weights[names[name]] += p.numel()
    blind = len(tensors) > 1 and isinstance(model, InferredChain | UserModel)
    if not chosen.by_shape and (blind or chosen.name not in tensors):
        raise UsageError(
            f"optimizer={chosen.name} steps matrices inside blocks, and of this model it is not known which these are",
            where="model.kind, train.optimizer",
            fix="a model with stem, blocks and head, whose blocks have weights of two dims; or --train.optimizer adamw",
            code="P28",
        )
    if chosen.observed:
        _need_layers(chosen.name, model, [name for name, member in names.items() if member == chosen.name])
    if len(tensors) == 1:
        return []
    shares = (f"{name} steps {count} tensors of {weights[name]:,} weights" for name, count in tensors.items())
    return [f"optimizer: {', '.join(shares)}"]


def _need_layers(optimiser: str, model: nn.Module, names: Sequence[str]) -> None:
    """Raises UsageError P28 for a parameter that is not the weight of a linear layer."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        if leaf != "weight" or not isinstance(model.get_submodule(owner), nn.Linear):
            raise UsageError(
                f"optimizer={optimiser} observes what passes linear layers, and {name} is not the weight of one",
                where="model.kind, train.optimizer",
                fix="torch.nn.Linear in its place; or --train.optimizer soap",
                code="P28",
            )

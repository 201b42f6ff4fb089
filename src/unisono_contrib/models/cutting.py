"""A user's module without stem, blocks and head as a chain along its graph; whole, and why, where it has none."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.models.chain import Chain
from unisono.models.plain import UserModel, forward_of, kept_whole, one_input
from unisono.spec.frames import words
from unisono_contrib.models.inferred import inferred
from unisono_contrib.models.traced import Untraceable


def cut_model(model: UserModel, sample: Tensor) -> Chain:
    """A user's whole module as a chain along its graph; as it is, with the reason, where it has none. sample: an input
    of one sample, [1, ...]."""
    module = one_input(model.stem.module)  # type: ignore[arg-type]
    own_loss = getattr(module, "loss", None)
    try:
        chain = inferred(module, sample, model.loss, plain=own_loss is None)
        if own_loss is None and chain.scores and isinstance(chain.scores[0], tuple):
            raise Untraceable("its forward returns several tensors, and it has no loss", forward_of(module))
        if own_loss is not None and (why := looks_at(own_loss, module, chain.scores, sample)):
            raise Untraceable(why, forward_of(module))
    except Untraceable as error:
        where = f" ({error.where})" if error.where else ""
        return kept_whole(UserModel(module), f"its graph cannot be cut: {error.why}{where}")
    for (
        parameter
    ) in module.parameters():  # the chain has their values; a loss of the module's keeps the module
        parameter.data = parameter.data.new_empty(0)
    return chain


class _Looking(TorchFunctionMode):
    """Sees whether one of these tensors is read."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()
        self._held, self.seen = {id(t) for t in held}, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= any(id(x) in self._held for x in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def looks_at(
    loss: Callable[[Any, Tensor], Tensor], module: nn.Module, scores: Sequence[tuple[int, ...]] | tuple[int, ...],
    sample: Tensor,
) -> str:  # fmt: skip
    """Why a loss of the module's own keeps it whole: it reads the module's tensors, or it cannot be tried; "" where
    neither. scores: shape of each output for one sample; one shape where there is one output."""
    tokens = not sample.is_floating_point()
    targets = torch.zeros((2, *sample.shape[1:]) if tokens else (2,), dtype=torch.int64)
    several = bool(scores) and isinstance(scores[0], tuple)
    outputs = [torch.ones(2, *shape) for shape in (scores if several else [scores])]  # type: ignore[misc]
    looking = _Looking([*module.parameters(), *module.buffers()])
    try:
        with torch.no_grad(), looking:
            loss(tuple(outputs) if several else outputs[0], targets)
    except Exception as error:
        return f"its loss could not be tried on zeros: {words(error, 120)}"
    return "its loss reads weights of the model" if looking.seen else ""

"""What cannot be prepared, said before anything is changed."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from unisono.parallel.params import Slot
from unisono.spec.errors import UsageError


def fit(model: nn.Module, optimizer: Optimizer, known: Sequence[nn.Module]) -> None:
    """Raises UsageError J02 if the model or the optimiser is nothing that `prepare` can spread."""
    _is_a(model, nn.Module, "the model", "a torch.nn.Module")
    _is_a(optimizer, Optimizer, "the optimiser", "a torch.optim.Optimizer")
    if isinstance(model, DistributedDataParallel):
        raise _cannot("the model is wrapped in DistributedDataParallel", "give the model itself")
    if any(model is other for other in known):
        raise _cannot("this model is prepared already", "prepare each model once")
    own = dict(model.named_parameters())
    unborn = [name for name, p in own.items() if p.is_meta or isinstance(p, UninitializedParameter)]
    if not own or unborn:
        what = (
            f"{unborn[0]} has no values yet (meta device, or lazy)"
            if unborn
            else "the model has no parameters"
        )
        raise _cannot(what, "give a model with its initial weights")
    sparse = [
        n for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    ]
    if sparse:
        raise _cannot(f"{sparse[0] or 'the model'} has sparse gradients", "sparse=False in the embedding")
    strangers = {id(p) for group in optimizer.param_groups for p in group["params"]} - {
        id(p) for p in own.values()
    }
    if strangers:
        what = f"the optimiser steps {len(strangers)} parameters that are not the model's"
        raise _cannot(what, "make the optimiser from model.parameters(), after the last change to the model")


def all_known(optimizer: Optimizer, slots: Sequence[Slot]) -> None:
    """Raises UsageError J02 if the optimiser is about to step a gradient that has not met the other ranks'."""
    known = {id(slot.live) for slot in slots}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) not in known:
                what = f"a parameter of shape {list(p.shape)} has joined since `prepare`, its gradient met no other"
                raise _cannot(what, "let it require gradients, and be the model's, before job.prepare")


def _is_a(value: object, kind: type, what: str, wanted: str) -> None:
    if not isinstance(value, kind):
        fix = "job.prepare(model, optimizer, data), in this order"
        raise _cannot(f"{what} is {type(value).__name__}, not {wanted}", fix)


def _cannot(what: str, fix: str) -> UsageError:
    return UsageError(what, where="job.prepare", fix=fix, code="J02")

"""Refuse what `job.prepare` cannot spread, before anything is changed."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from unisono.parallel.params import Slot
from unisono.spec.errors import UsageError


def fit(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises UsageError J02 if the model or an optimiser is nothing that `prepare` can spread."""
    _is_a(model, nn.Module, "the model", "a torch.nn.Module")
    if not optimizers:
        raise _cannot("there is no optimiser", "job.prepare(model, optimizer, data)")
    for optimizer in optimizers:
        _is_a(optimizer, Optimizer, "the optimiser", "a torch.optim.Optimizer, or a list of them")
    if isinstance(model, DistributedDataParallel):
        raise _cannot("the model is wrapped in DistributedDataParallel", "give the model itself")
    parameters = dict(model.named_parameters())
    unborn = [name for name, p in parameters.items() if p.is_meta or isinstance(p, UninitializedParameter)]
    if not parameters or unborn:
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


def own_only(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises UsageError J02 if an optimiser steps what is not the model's."""
    parameters = {id(p) for p in model.parameters()}
    strangers = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]} - parameters
    if strangers:
        what = f"the optimiser steps {len(strangers)} parameters that are not the model's"
        raise _cannot(what, "make the optimiser from model.parameters(), after the last change to the model")


def new_only(optimizers: Sequence[Optimizer], known: Sequence[Optimizer]) -> None:
    """Raises UsageError J02 for an optimiser that this model is prepared with already."""
    if any(new is old for new in optimizers for old in known):
        raise _cannot("this model is prepared with this optimiser already", "prepare each optimiser once")


def all_known(optimizer: Optimizer, slots: Sequence[Slot]) -> None:
    """Raises UsageError J02 if the optimiser is about to step a gradient that has not met the other ranks'."""
    known = {id(slot.live) for slot in slots}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) not in known:
                what = f"a parameter of shape {list(p.shape)} has joined since `prepare`, its gradient met no other"
                raise _cannot(what, "let it be the model's before job.prepare; it may be frozen until later")


def all_stepped(optimizers: Sequence[Optimizer], slots: Sequence[Slot]) -> None:
    """Raises UsageError J19 for a sharded parameter that no optimiser known here would step: one made before `prepare`
    steps the parameter that was there before."""
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    left = [slot.name for slot in slots if id(slot.live) not in stepped]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UsageError(
            f"{left[0]}{more} requires gradients, and no optimiser given to job.prepare steps it",
            where="plan.shard",
            likely="another optimiser of this model, which holds the parameters that sharding has replaced",
            fix="job.prepare(model, [optimizer, the_other], data), or requires_grad_(False) for what is not trained",
            code="J19",
        )


def _is_a(value: object, kind: type, what: str, wanted: str) -> None:
    if not isinstance(value, kind):
        fix = "job.prepare(model, optimizer, data), in this order"
        raise _cannot(f"{what} is {type(value).__name__}, not {wanted}", fix)


def _cannot(what: str, fix: str) -> UsageError:
    return UsageError(what, where="job.prepare", fix=fix, code="J02")

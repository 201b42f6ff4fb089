"""Tied weights: one weight under two names, the owner's and an alias's, each use with a gradient of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.comm.group import Group
from unisono.parallel.cut import stage_of
from unisono.parallel.params import Slot, nothing_for
from unisono.parallel.pass_context import PassContext, Stages


@dataclass(frozen=True, slots=True)
class Tie:
    """One weight under two names. `here`: the slots of this rank that take part, owner first. `group`: the two
    ranks that hold them, or a group of one if both are here."""

    here: tuple[Slot, ...]
    group: Group

    def add_uses(self) -> None:
        """Add the alias's gradient to the owner's, where both uses are here."""
        if len(self.here) == 2:
            owner, alias = (slot.master for slot in self.here)
            if owner.grad is None:
                owner.grad = alias.grad
            elif alias.grad is not None:
                owner.grad.add_(alias.grad)

    def join(self) -> bool:
        """After replicas have met: sum the gradients of two ranks, or give the alias here what its owner has. Returns
        whether this rank's half had none, and zeros stood for it. Both ranks call it, or it hangs."""
        master = self.here[0].master
        if len(self.here) == 1:
            lacks = master.grad is None
            grad = nothing_for(master) if master.grad is None else master.grad
            master.grad = self.group.all_reduce(grad)
            return lacks
        alias = self.here[1].master
        # An alias that is sharded has storage of its own, and takes the same step as its owner.
        apart = alias.data_ptr() != master.data_ptr()
        alias.grad = master.grad.clone() if apart and master.grad is not None else None
        return False

    def drop_unused(self, lacks: bool) -> None:
        """Forget the sum of two ranks if neither had a gradient. Both ranks call it, or it hangs."""
        if len(self.here) == 1:
            slot = self.here[0]
            halves = self.group.all_reduce(slot.master.new_tensor([float(lacks)]))
            if halves.item() == 2.0:
                slot.drop_gradient()


def untie(stages: Stages, context: PassContext) -> None:
    """Give every alias a parameter of its own, so that each use collects its own gradient and one stage sums in
    the order in which two would."""
    for alias in context.owners:
        for stage in stages.values():
            if any(alias == name for name, _ in stage.named_parameters(remove_duplicate=False)):
                whole = stage.get_parameter(alias)
                _put(stage, alias, nn.Parameter(torch.empty_like(whole), requires_grad=whole.requires_grad))


def share(stages: Stages, context: PassContext) -> None:
    """Let uses on one rank have one storage. FSDP2 keeps a weight once only if both uses are one parameter; autograd
    then sums the two uses."""
    named = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    for alias, owner in context.owners.items():
        if alias not in named or owner not in named:
            continue
        if context.plan.shard == 1:
            named[alias].data = named[owner].data
        elif not context.apart:
            _put(stages[0], alias, named[owner])


def _put(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(stage.get_submodule(module), leaf, parameter)


def ties_of(slots: Sequence[Slot], context: PassContext) -> tuple[Tie, ...]:
    """The tied weights of which this rank holds a use, where uses have gradients of their own."""
    if not context.apart:
        return ()
    by_name: Mapping[str, Slot] = {slot.name: slot for slot in slots}
    mesh, ties = context.mesh, []
    for alias, owner in context.owners.items():
        here = tuple(by_name[name] for name in (owner, alias) if name in by_name)
        rows = [mesh.at["pp"]]
        if len(here) == 1:
            # Uses in a second copy of the model (DualPipe) meet each other; where both are here, nobody else is asked.
            chain = len(context.blocks) * here[0].copy
            rows = [context.placement[chain + stage_of(name, context.blocks)] for name in (owner, alias)]
        ranks = {mesh.members.ranks[mesh.shape.rank({**mesh.at, "pp": row})] for row in rows}
        group = mesh.group_across("pp", sorted(ranks))
        if here:
            ties.append(Tie(here, group))
    return tuple(ties)

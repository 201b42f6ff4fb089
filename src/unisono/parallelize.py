"""Model + plan + mesh → what one rank holds: the passes, in the one legal order.

build on meta → cut into stages → split over tp → initialise by name → recompute → compile → shard → slots → buckets
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.bucket import Bucket, Buckets
from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.comm.tree import TreeSum
from unisono.parallel.cut import Stage, boundary_shapes, cut
from unisono.parallel.params import Slot, slots_of
from unisono.parallel.play import Wires
from unisono.parallel.recompute import recompute_blocks
from unisono.parallel.shard import Sharded, Whole
from unisono.parallel.tensor import Cut, part_of, split_modules, vocab_loss
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Split


@dataclass(frozen=True, slots=True)
class Tie:
    """One weight under two names. `here`: the slots of this rank that take part, owner first. `group`: the two
    stages that hold them, or a group of one if both are here."""

    here: tuple[Slot, ...]
    group: Group


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank holds of the model."""

    stage: Stage
    slots: tuple[Slot, ...]
    shapes: Mapping[
        str, tuple[int, ...]
    ]  # of every parameter of the whole model that counts, in its own order
    buckets: Buckets
    sharding: Whole
    ties: tuple[Tie, ...]
    wires: Wires
    tp: Group
    trees: Mapping[str, TreeSum]  # canonical: how this rank's leaves are added up; else empty

    def leaf_done(self, leaf: int) -> None:
        """Canonical: after the backward of one leaf, take its gradients into the trees."""
        for slot in self.slots:
            slot.take_gradient()
            grad = slot.master.grad
            slot.drop_gradient()
            if grad is not None:
                slot.master.grad = self.trees[slot.name].add(leaf, grad)

    def close_replica(self) -> list[Bucket]:
        """After the last backward: finish the sums inside this replica; returns the late buckets, ready to leave."""
        self.buckets.finish()
        if self.trees:
            for slot in self.slots:
                if slot.master.grad is None:
                    slot.master.grad = self.trees[slot.name].close()
        else:
            for slot in self.slots:
                slot.take_gradient()
        for tie in self.ties:
            if len(tie.here) == 2 and not self.trees:
                _add_gradient(tie.here[0].master, tie.here[1].master)
        for i, group in enumerate(self.buckets.late):
            for bucket in group:
                bucket.fill()
                if i == 0:  # the first group is the partial sums of `tp`
                    self.tp.all_reduce(bucket.body)
        return [bucket for group in self.buckets.late for bucket in group]

    def join_ties(self) -> None:
        """After replicas have met: sum the two halves of each tied gradient that lie on two stages."""
        for tie in self.ties:
            master = tie.here[0].master
            if len(tie.here) == 1:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                tie.group.all_reduce(master.grad)
                continue
            alias = tie.here[1].master
            if self.trees:  # one order for all layouts: replicas first, then the two uses
                _add_gradient(master, alias)
            # An alias that is sharded has storage of its own, and takes the same step as its owner.
            apart = alias.data_ptr() != master.data_ptr()
            alias.grad = master.grad.clone() if apart and master.grad is not None else None

    def drop_gradients(self) -> None:
        """Forget this step's gradients."""
        for slot in self.slots:
            slot.drop_gradient()


def _add_gradient(owner: nn.Parameter, alias: nn.Parameter) -> None:
    if owner.grad is None:
        owner.grad = alias.grad
    elif alias.grad is not None:
        owner.grad.add_(alias.grad)


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    values: Callable[[str], Tensor],
    sample: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tail: int,
    compiled: bool = False,
) -> Local:
    """Build this rank's part.

    model: whole and uncut, on the meta device or not; it is consumed. values(name): the full initial tensor of a
    logical name. sample: a meta tensor shaped like the inputs of one micro-batch. tail: how many numbers of the step
    travel with its gradients.
    """
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    owners = dict(anatomy.ties)
    if plan.tp > 1 and not anatomy.splits:
        what = "this model says nothing of how tp could split it"
        raise UsageError(
            what, where="plan.tp, model.kind", fix="tp=1, or a model with an anatomy", code="P12"
        )
    canonical = plan.sync == "canonical"
    stage, wires = _stage(model, plan, mesh, sample, dtype, device)
    _untie(stage, owners)
    cuts = split_modules(stage, anatomy, mesh.tp)
    head = next((n for n, s in anatomy.splits.items() if s is Split.VOCAB_OUT), None)
    if mesh.tp.size > 1 and stage.last and head is not None:
        start, _ = part_of(shapes[f"{head}.weight"][0], mesh.tp)
        stage.loss = vocab_loss(mesh.tp, start)
    _fill(stage, values, owners, cuts, dtype, device)
    apart = (
        plan.shard == 1 or plan.pp > 1 or canonical
    )  # the uses of a tied weight collect gradients of their own
    if plan.shard == 1:
        _share_storage(stage, owners)
    elif not apart:
        _share_parameter(stage, owners)
    if plan.recompute == "full":
        recompute_blocks(stage.blocks.values())
    if compiled:
        for block in stage.blocks.values():
            block.compile()
    sharding = Whole()
    if plan.shard > 1:
        sharding = Sharded(stage, stage.blocks.values(), mesh.shard, plan.zero, each=canonical)
    slots = slots_of(stage, shapes, cuts, mesh.shard, mesh.tp, anatomy.sequence > 0, frozenset(owners))
    ties = _ties(slots, owners, mesh) if apart else ()
    buckets = _buckets(slots, ties, mesh, plan.shard > 1, canonical, tail)
    counted = {name: shape for name, shape in shapes.items() if name not in owners}
    trees = {slot.name: TreeSum(plan.micros or 1) for slot in slots} if canonical else {}
    return Local(stage, tuple(slots), counted, buckets, sharding, ties, wires, mesh.tp, trees)


def _stage(
    model: nn.Module, plan: Plan, mesh: Mesh, sample: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Stage, Wires]:
    index = mesh.at["pp"]
    if plan.pp > max(1, len(model.blocks)):  # type: ignore[arg-type]
        what = f"pp={plan.pp} stages need as many blocks, this model shows {len(model.blocks)}"  # type: ignore[arg-type]
        fix = "pp=1, or a model with stem, blocks and head"
        raise UsageError(what, where="plan.pp, model.kind", fix=fix, code="P13")
    if plan.pp == 1:
        blocks, came, sent = range(len(model.blocks)), (), ()  # type: ignore[arg-type]
    else:
        cuts = cut(model, plan.pp)
        edges = boundary_shapes(model, cuts, sample)
        if model.anatomy.sequence and mesh.tp.size > 1:  # type: ignore[union-attr]
            edges = [(b, t // mesh.tp.size, *rest) for b, t, *rest in edges]
        blocks = cuts[index]
        came = edges[index - 1] if index else ()
        sent = edges[index] if index < plan.pp - 1 else ()
    stage = Stage(model, blocks, index, plan.pp)
    return stage, Wires(mesh.pp, mesh.pp_back, tuple(came), tuple(sent), dtype, device)


def _untie(stage: Stage, owners: Mapping[str, str]) -> None:
    """Give every alias a parameter of its own, so that each use collects its own gradient and one stage sums in
    the order in which two would."""
    for alias in owners:
        module, _, leaf = alias.rpartition(".")
        if _has(stage, alias):
            whole = stage.get_parameter(alias)
            setattr(stage.get_submodule(module), leaf, nn.Parameter(torch.empty_like(whole)))


def _has(stage: nn.Module, name: str) -> bool:
    return any(name == known for known, _ in stage.named_parameters(remove_duplicate=False))


@torch.no_grad()
def _fill(
    stage: Stage,
    values: Callable[[str], Tensor],
    owners: Mapping[str, str],
    cuts: Mapping[str, Cut],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if any(p.is_meta for p in stage.parameters()):
        stage.to_empty(device=device)
    stage.to(device=device, dtype=dtype)
    for name, parameter in stage.named_parameters():
        full = values(owners.get(name, name))
        cut = cuts.get(name)
        part = full if cut is None else full.narrow(cut.dim, cut.start, cut.size)
        parameter.copy_(part)


def _share_storage(stage: Stage, owners: Mapping[str, str]) -> None:
    for alias, owner in owners.items():
        if _has(stage, alias) and _has(stage, owner):
            stage.get_parameter(alias).data = stage.get_parameter(owner).data


def _share_parameter(stage: Stage, owners: Mapping[str, str]) -> None:
    """FSDP2 keeps a weight once only if both uses are one parameter; autograd then sums the two uses."""
    for alias, owner in owners.items():
        module, _, leaf = alias.rpartition(".")
        setattr(stage.get_submodule(module), leaf, stage.get_parameter(owner))


def _ties(slots: list[Slot], owners: Mapping[str, str], mesh: Mesh) -> tuple[Tie, ...]:
    by_name = {slot.name: slot for slot in slots}
    ends = [{**mesh.at, "pp": stage} for stage in (0, mesh.shape.pp - 1)]
    ranks = sorted({mesh.shape.rank(at) for at in ends})
    ties = []
    for alias, owner in owners.items():
        here = tuple(by_name[name] for name in (owner, alias) if name in by_name)
        if here:
            ties.append(Tie(here, mesh.group_of("pp", ranks)))
    return tuple(ties)


def _buckets(
    slots: list[Slot], ties: tuple[Tie, ...], mesh: Mesh, sharded: bool, canonical: bool, tail: int
) -> Buckets:
    """Which gradients leave during backward, and which wait for sums inside the replica."""
    slots = [slot for slot in slots if slot.live.requires_grad]
    partial = [slot.master for slot in slots if slot.partial]
    if mesh.dp.size == 1:
        return Buckets((), (partial,))
    rest = [slot for slot in slots if not slot.partial]
    if canonical:  # leaves are added up first, and both uses of a tied weight travel
        return Buckets((), (partial, [s.master for s in rest]), tail, multiple=mesh.dp.size)
    twins = [slot for tie in ties if len(tie.here) == 2 for slot in tie.here]
    owners = [slot.master for slot in twins if not slot.alias]
    rest = [s for s in rest if not any(s is twin for twin in twins)]
    if sharded:
        return Buckets((), (partial, [*owners, *(s.master for s in rest)]), tail, over=mesh.dp)
    return Buckets([s.live for s in rest], (partial, owners), tail, over=mesh.dp)

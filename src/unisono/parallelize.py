"""Model + plan + mesh → what one rank holds: the passes, in the one legal order.

build on meta → cut into stages → split over tp → initialise by name → recompute → compile → shard → slots → buckets
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.bucket import Bucket, Buckets
from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.comm.tree import TreeSum
from unisono.parallel.cut import Stage, boundaries, cut, stage_of
from unisono.parallel.params import Slot, slots_of
from unisono.parallel.play import Wire
from unisono.parallel.recompute import recompute_blocks
from unisono.parallel.shard import Sharded, Whole
from unisono.parallel.tensor import Cut, part_of, split_modules, vocab_loss
from unisono.plan import Plan
from unisono.programs.pipeline import Timetable
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Split


@dataclass(frozen=True, slots=True)
class Tie:
    """One weight under two names. `here`: the slots of this rank that take part, owner first. `group`: the two
    ranks that hold them, or a group of one if both are here."""

    here: tuple[Slot, ...]
    group: Group


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank holds of the model: stages by their number, slots of all of them. owners: alias → owner of tied
    weights."""

    stages: Mapping[int, Stage]
    owners: Mapping[str, str]
    slots: tuple[Slot, ...]
    shapes: Mapping[
        str, tuple[int, ...]
    ]  # of every parameter of the whole model that counts, in its own order
    buckets: Buckets
    sharding: Mapping[int, Whole]  # by stage
    ties: tuple[Tie, ...]
    wires: Mapping[int, Wire]  # by the stage before the boundary
    device: torch.device
    tp: Group
    trees: Mapping[str, TreeSum]  # canonical: how this rank's leaves are added up; else empty

    @property
    def holds_loss(self) -> bool:
        """Whether the last stage, which computes the loss, is here."""
        return any(stage.last for stage in self.stages.values())

    def train(self, on: bool) -> None:
        """Training mode of all stages, or evaluation mode."""
        for stage in self.stages.values():
            stage.train(on)

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
    timetable: Timetable,
    mesh: Mesh,
    values: Callable[[str], Tensor],
    sample: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tail: int,
    compiled: bool = False,
) -> Local:
    """Build this rank's part: the stages that its row of the timetable owns.

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
    blocks = _blocks_of(model, timetable.length)
    owned = timetable.owned(mesh.at["pp"])
    wires = _wires(model, blocks, owned, mesh, sample, dtype)
    stages = {i: Stage(model, blocks[i], i, timetable.length) for i in owned}
    cuts: dict[str, Cut] = {}
    for stage in stages.values():
        _untie(stage, owners)
        cuts |= split_modules(stage, anatomy, mesh.tp)
        head = next((n for n, s in anatomy.splits.items() if s is Split.VOCAB_OUT), None)
        if mesh.tp.size > 1 and stage.last and head is not None:
            start, _ = part_of(shapes[f"{head}.weight"][0], mesh.tp)
            stage.loss = vocab_loss(mesh.tp, start)
        _fill(stage, values, owners, cuts, dtype, device)
    # Whether the uses of a tied weight collect gradients of their own.
    apart = plan.shard == 1 or timetable.stages > 1 or canonical
    if plan.shard == 1:
        _share_storage(stages, owners)
    elif not apart:
        _share_parameter(stages[0], owners)
    for stage in stages.values():
        if plan.recompute == "full":
            recompute_blocks(stage.blocks.values())
        if compiled:
            for block in stage.blocks.values():
                block.compile()
    sharding = {i: Whole() for i in stages}
    if plan.shard > 1:
        sharding = {
            i: Sharded(stage, stage.blocks.values(), mesh.shard, plan.zero, each=canonical)
            for i, stage in stages.items()
        }
    sequence, aliases = anatomy.sequence > 0, frozenset(owners)
    slots = [
        slot
        for stage in stages.values()
        for slot in slots_of(stage, shapes, cuts, mesh.shard, mesh.tp, sequence, aliases)
    ]
    rows = {name: timetable.placement[stage_of(name, blocks)] for tie in anatomy.ties for name in tie}
    ties = _ties(slots, owners, rows, mesh) if apart else ()
    buckets = _buckets(slots, ties, mesh, plan.shard > 1, canonical, tail)
    counted = {name: shape for name, shape in shapes.items() if name not in owners}
    trees = {slot.name: TreeSum(plan.micros or 1) for slot in slots} if canonical else {}
    return Local(
        stages, owners, tuple(slots), counted, buckets, sharding, ties, wires, device, mesh.tp, trees
    )


def _blocks_of(model: nn.Module, stages: int) -> list[range]:
    """The blocks of each stage."""
    count = len(model.blocks)  # type: ignore[arg-type]
    if stages > max(1, count):
        what = f"{stages} pipeline stages need as many blocks, this model shows {count}"
        fix = "pp=1, or a model with stem, blocks and head"
        raise UsageError(what, where="plan.pp, plan.schedule, model.kind", fix=fix, code="P13")
    return cut(model, stages) if stages > 1 else [range(count)]


def _wires(
    model: nn.Module,
    blocks: Sequence[range],
    owned: Sequence[int],
    mesh: Mesh,
    sample: Tensor,
    dtype: torch.dtype,
) -> dict[int, Wire]:
    """The boundaries of this rank's stages, by the stage before."""
    if len(blocks) == 1:
        return {}
    sequence: int = model.anatomy.sequence  # type: ignore[union-attr,assignment]

    def crossing(x: Tensor) -> Tensor:
        shape = list(x.shape)
        if sequence and x.dim() > 1 and shape[1] == sequence:
            shape[1] //= mesh.tp.size
        return x.new_empty(shape, dtype=dtype if x.is_floating_point() else x.dtype)

    carries = [tuple(map(crossing, carry)) for carry in boundaries(model, blocks, sample)]
    return {
        i: Wire(mesh.pp, mesh.pp_back, carry)
        for i, carry in enumerate(carries)
        if i in owned or i + 1 in owned
    }


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


def _share_storage(stages: Mapping[int, Stage], owners: Mapping[str, str]) -> None:
    named = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    for alias, owner in owners.items():
        if alias in named and owner in named:
            named[alias].data = named[owner].data


def _share_parameter(stage: Stage, owners: Mapping[str, str]) -> None:
    """FSDP2 keeps a weight once only if both uses are one parameter; autograd then sums the two uses."""
    for alias, owner in owners.items():
        module, _, leaf = alias.rpartition(".")
        setattr(stage.get_submodule(module), leaf, stage.get_parameter(owner))


def _ties(
    slots: list[Slot], owners: Mapping[str, str], rows: Mapping[str, int], mesh: Mesh
) -> tuple[Tie, ...]:
    """rows: of the pipeline, by the name of a tied weight."""
    by_name = {slot.name: slot for slot in slots}
    ties = []
    for alias, owner in owners.items():
        here = tuple(by_name[name] for name in (owner, alias) if name in by_name)
        if here:
            ranks = {mesh.shape.rank({**mesh.at, "pp": rows[name]}) for name in (owner, alias)}
            ties.append(Tie(here, mesh.group_of("pp", sorted(ranks))))
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

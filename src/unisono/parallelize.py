"""Model + plan + mesh → what one rank holds: the passes, in the one legal order.

build on meta → cut into stages → split over tp → initialise by name → recompute → compile → shard → slots
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
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
    shapes: Mapping[str, tuple[int, ...]]  # of all parameters of the whole model that count, in its own order
    sharding: Mapping[int, Whole]  # by stage
    ties: tuple[Tie, ...]
    wires: Mapping[int, Wire]  # by the stage before the boundary
    device: torch.device

    @property
    def holds_loss(self) -> bool:
        """Whether the last stage, which computes the loss, is here."""
        return any(stage.last for stage in self.stages.values())

    def train(self, on: bool) -> None:
        """Training mode of all stages, or evaluation mode."""
        for stage in self.stages.values():
            stage.train(on)


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
    leafwise: bool = False,
    compiled: bool = False,
) -> Local:
    """Build this rank's part: the stages that its row of the timetable owns.

    model: whole and uncut, on the meta device or not; it is consumed. values(name): the full initial tensor of a
    logical name. sample: a meta tensor shaped like the inputs of one micro-batch. leafwise: the gradient of each
    micro-batch is wanted by itself.
    """
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    owners = dict(anatomy.ties)
    if plan.tp > 1 and not anatomy.splits:
        what = "this model says nothing of how tp could split it"
        raise UsageError(
            what, where="plan.tp, model.kind", fix="tp=1, or a model with an anatomy", code="P12"
        )
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
    apart = plan.shard == 1 or timetable.stages > 1 or leafwise
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
            i: Sharded(stage, stage.blocks.values(), mesh.shard, plan.zero, each=leafwise)
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
    counted = {name: shape for name, shape in shapes.items() if name not in owners}
    return Local(stages, owners, tuple(slots), counted, sharding, ties, wires, device)


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
            own = nn.Parameter(torch.empty_like(whole), requires_grad=whole.requires_grad)
            setattr(stage.get_submodule(module), leaf, own)


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

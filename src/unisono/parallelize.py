"""Model + plan + mesh → what one rank holds: the passes, in the one legal order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.comm.mesh import Mesh
from unisono.parallel.compiling import compile_blocks
from unisono.parallel.cut import Costs, Stage, boundaries, cut, distinct
from unisono.parallel.experts import deal_experts
from unisono.parallel.fill import fill, settle
from unisono.parallel.masters import keep_masters, rounding_of
from unisono.parallel.mirror import Mirror, mirror_of
from unisono.parallel.offload.keeping import keep_at_home
from unisono.parallel.offload.param_streaming import lend
from unisono.parallel.offload.store import Store
from unisono.parallel.params import Slot, slots_of
from unisono.parallel.parts import part_of
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.positions import deal_positions
from unisono.parallel.post import Wire
from unisono.parallel.precision import HALF
from unisono.parallel.recompute import recompute_blocks, recompute_parts, wants
from unisono.parallel.shard import Sharded, Whole
from unisono.parallel.stochastic import keep_narrow
from unisono.parallel.tensor import split
from unisono.parallel.ties import Tie, share, ties_of, untie
from unisono.plan import Plan
from unisono.plan.blocks import Away, on_disk, options_of
from unisono.plan.grid import Grid
from unisono.programs.pipeline import Timetable
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.layout import Anatomy, Split

_TABLES, _GRID = "unisono.parallel.tables", "unisono.parallel.grid"  # of the sister package


@dataclass(frozen=True, slots=True)
class Pass:
    """One change of a rank's stages. wanted(context): whether plan and model ask for it. at_once: what it adds serves
    one backward after a forward, such as gathered shards, so a backward may not go in two halves."""

    name: str
    wanted: Callable[[PassContext], bool]
    apply: Callable[[Stages, PassContext], None]
    at_once: bool = False


def _shard(stages: Stages, context: PassContext) -> None:
    how = context.plan.wires, context.plan.arithmetic.narrow
    for i, stage in stages.items():
        blocks = stage.blocks.values()
        apart = {
            p for name, p in stage.named_parameters() if name in context.dealt and context.dealt[name].apart
        }
        apart |= contributed(_TABLES).ignored(stage, context) if context.anatomy.tables else set()
        zeros = {block: context.each[int(name)].zero for name, block in stage.blocks.items()}
        options = context.states, context.plan.zero, context.leafwise, apart, *how, zeros, context.device
        context.sharding[i] = Sharded(stage, blocks, *options)
        if context.values is None:
            settle(stage, context)


def _of_sister(module: str, function: str) -> Callable[[Stages, PassContext], None]:
    """A pass of the sister package: a function beside a module of the core's name."""
    return lambda stages, context: getattr(contributed(module), function)(stages, context)


def _in_a_row(context: PassContext) -> bool:
    return context.plan.tp > 1 and context.virtual == 1 and not isinstance(context.plan.tp, Grid)


def _splits(context: PassContext) -> bool:
    return _in_a_row(context) and not _is_traced(context)


def _is_traced(context: PassContext) -> bool:
    """Whether the model is a chain of units of a graph."""
    return Split.GRAPH in context.anatomy.splits.values()


def _deals_experts(context: PassContext) -> bool:
    return context.plan.ep * context.plan.tp > 1 and Split.EXPERTS in context.anatomy.splits.values()


# Values are drawn by name, so names and cuts come before; wrappers of forward before FSDP2, which hooks them; storage
# is shared once there is any, and before FSDP2 takes it.
PASSES = (
    Pass("untie", lambda context: bool(context.owners), untie),
    Pass("tables", lambda context: bool(context.anatomy.tables), _of_sister(_TABLES, "deal"), at_once=True),
    Pass(
        "virtual shards",
        lambda context: context.virtual > 1,
        _of_sister("unisono.parallel.virtual.build", "virtualize"),
    ),
    Pass("split", lambda context: _splits(context) and context.plan.chunks == 1, split),
    Pass(
        "split in chunks", lambda context: _splits(context) and context.plan.chunks > 1, split, at_once=True
    ),
    Pass(
        "graph",
        lambda context: _in_a_row(context) and _is_traced(context),
        _of_sister("unisono.parallel.graphs", "split_graphs"),
    ),
    Pass(
        "grid",
        lambda context: isinstance(context.plan.tp, Grid),
        _of_sister(_GRID, "split_over_grid"),
        at_once=True,
    ),
    Pass("experts", _deals_experts, deal_experts),
    Pass(
        "positions",
        lambda context: context.plan.cp * context.plan.tp > 1 and context.virtual == 1,
        deal_positions,
    ),
    Pass("fill", lambda context: True, fill),
    Pass("share", lambda context: bool(context.owners), share),
    Pass("lend", lambda context: context.puts_away(lambda away: away.params), lend),
    Pass("recompute parts", wants("selective"), recompute_parts),
    Pass("narrow", lambda context: context.plan.arithmetic.stochastic, keep_narrow),
    Pass(
        "masters", lambda context: context.plan.shard == 1 and rounding_of(context) is not None, keep_masters
    ),
    Pass(
        "float8",
        lambda context: context.plan.arithmetic.fp8,
        _of_sister("unisono.parallel.float8", "use_float8"),
        at_once=True,
    ),
    Pass("recompute", wants("full"), recompute_blocks, at_once=True),
    Pass(
        "offload",
        lambda context: context.puts_away(lambda away: away.params or away.activations),
        keep_at_home,
    ),
    Pass("compile", lambda context: context.compiled, compile_blocks, at_once=True),
    Pass("shard", lambda context: context.plan.shard > 1, _shard, at_once=True),
)


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank holds of the model: stages by their number, slots of all of them. owners: alias → owner of tied
    weights. away: what of each slot, by its name. halves: whether their backward may go in two. routers: experts of
    each of the whole model's."""

    stages: Mapping[int, Stage]
    owners: Mapping[str, str]
    slots: tuple[Slot, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of all parameters of the whole model that count, in its own order
    sharding: Mapping[int, Whole]  # by stage
    ties: tuple[Tie, ...]
    mirror: Mirror
    wires: Mapping[int, Wire]  # by the stage before the boundary
    device: torch.device
    halves: bool
    routers: Mapping[str, int]
    store: Store
    away: Mapping[str, Away]
    blocks: tuple[int, ...]  # of each stage
    notes: tuple[str, ...] = ()  # what was inferred of the model, in words
    cut_names: Mapping[str, Sequence[object]] = field(default_factory=dict)  # see `InferredChain`

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
    values: Callable[[str], Tensor] | None,
    sample: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    leafwise: bool = False,
    virtual: int = 1,
    compiled: bool = False,
    scratch: Path | None = None,
) -> Local:
    """Build this rank's part: the stages that its row of the timetable owns.

    model: whole and uncut, on the meta device or not; it is consumed. sample: a meta tensor shaped like the inputs of
    one micro-batch. values, leafwise, virtual: see `PassContext`. scratch: a folder for what is offloaded to disk.
    """
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    _refuse_draws(anatomy, mesh)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    schedule = SCHEDULES.read(plan.schedule)
    measure = _measured(model, sample, mesh, dtype, device) if schedule.measured else None
    blocks = blocks_of(model, timetable.length, schedule.blocks, measure)
    store = Store(device, on_disk(plan, each := options_of(plan, tuple(blocks))), scratch)
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    where = timetable.placement, values, dtype, device, store, sample.shape[0], each
    parts = (plan, mesh, anatomy, shapes, blocks, *where)
    context = PassContext(*parts, leafwise=leafwise, virtual=virtual, compiled=compiled, frozen=frozen)
    owned = timetable.owned(mesh.at["pp"])
    wires = _wires(model, owned, context, sample)
    length = timetable.length
    stages = {i: Stage(model, blocks[i % length], i % length, length) for i in owned}
    context.sharding.update((i, Whole()) for i in stages)
    chosen = [step for step in PASSES if step.wanted(context)]
    for step in chosen:
        step.apply(stages, context)
    slots = _slots(stages, context)
    slots = contributed(_TABLES).marked(slots, context) if anatomy.tables else slots
    slots = slots if schedule.flushed else contributed("unisono.parallel.flow").set_apart(slots)
    return Local(
        stages=stages,
        owners=context.owners,
        slots=tuple(slots),
        shapes={name: shape for name, shape in shapes.items() if name not in context.owners},
        sharding=context.sharding,
        ties=ties_of(slots, context),
        mirror=mirror_of(slots, timetable, mesh),
        wires=wires,
        device=device,
        halves=not any(step.at_once for step in chosen),
        routers=_routers(context),
        store=store,
        away={slot.name: context.kept_away(slot.name) for slot in slots},
        blocks=tuple(map(len, blocks)),
        notes=_inferred(model, plan),
        cut_names=getattr(model, "cut_names", {}),
    )


def _measured(
    model: nn.Module, sample: Tensor, mesh: Mesh, dtype: torch.dtype, device: torch.device
) -> Costs:
    """What measures the seconds of each block on this machine, for schedules that cut stages by them."""
    costs = contributed("unisono.parallel.measured").measured_costs
    return partial(costs, model, sample, mesh.world, dtype=dtype, device=device)


def _refuse_draws(anatomy: Anatomy, mesh: Mesh) -> None:
    """Raises UsageError P12 where modules of the model would draw other random numbers than one device."""
    if anatomy.drawn and mesh.world.size > 1:
        what = f"{anatomy.drawn}: draws random numbers that would differ from one device's; {anatomy.whole}"
        fix = "unisono.models.noise.Dropout in its place, or a forward whose graph can be traced"
        raise UsageError(what, where="plan, model.kind", fix=fix, code="P12")


def _inferred(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """What was inferred of the model, in lines; of a plain module, what `tp` deals only where the plan has it."""
    whole: str = model.anatomy.whole  # type: ignore[union-attr,assignment]
    says: tuple[str, ...] = getattr(model, "says", (f"kept whole: {whole}",) if whole else ())
    return (*getattr(model, "notes", ()), *(says if plan.tp > 1 else says[:1]))


def _slots(stages: Stages, context: PassContext) -> list[Slot]:
    """Of all stages of this rank; those of a pipeline's second copy of the model are numbered on."""
    mesh, aliases, sequence = context.mesh, frozenset(context.owners), context.anatomy.sequence > 0
    return [
        slot
        for i, stage in stages.items()
        for slot in slots_of(
            stage,
            context.shapes,
            context.cuts,
            mesh,
            sequence,
            aliases,
            i >= len(context.blocks),
            context.dealt,
            context.masters,
            states=context.states,
            added_up=context.virtual > 1,
        )
    ]


def _routers(context: PassContext) -> dict[str, int]:
    """Experts of each router of the whole model, in its order."""
    owners = {name: name.rpartition(".")[0] for name in context.shapes}
    return {
        router: context.shapes[name][0]
        for name, router in owners.items()
        if context.anatomy.split_of(router) is Split.ROUTER
    }


def blocks_of(
    model: nn.Module, stages: int, said: tuple[int, ...], costs: Costs | None = None
) -> list[range]:
    """The blocks of each stage, balanced by cost unless the plan has said how many each has."""
    count = len(model.blocks)  # type: ignore[arg-type]
    if stages - said.count(0) > max(1, count):  # the ends may be a stem and a head alone
        what = f"{stages} pipeline stages need as many blocks, this model shows {count}"
        what += f": {whole}" if (whole := model.anatomy.whole) else ""  # type: ignore[union-attr]
        fix = "pp=1, or a model with stem, blocks and head"
        raise UsageError(what, where="plan.pp, plan.schedule, model.kind", fix=fix, code="P13")
    if said:
        if (len(said), sum(said)) != (stages, count):
            what = f"the plan cuts {sum(said)} blocks into {len(said)} stages, here {count} lie in {stages}"
            fix = f"{stages} numbers that add up to {count}, or schedule without cut"
            raise UsageError(what, where="plan.schedule", fix=fix, code="P13")
        return [range(end - blocks, end) for blocks, end in zip(said, accumulate(said), strict=True)]
    return cut(model, stages, costs) if stages > 1 else [range(count)]


def _wires(model: nn.Module, owned: Sequence[int], context: PassContext, sample: Tensor) -> dict[int, Wire]:
    """The boundaries of this rank's stages, by the stage before."""
    if len(context.blocks) == 1:
        return {}
    mesh, sequence = context.mesh, context.anatomy.sequence

    def crossing(x: Tensor) -> Tensor:
        shape = list(x.shape)
        if sequence and x.dim() > 1 and shape[1] == sequence:
            dealt = context.length and context.virtual == 1
            shape[1] = part_of(context.length, mesh.tp)[1] if dealt else sequence // mesh.cp.size
            if isinstance(context.plan.tp, Grid):
                shape = contributed(_GRID).crossing_shape(tuple(shape), mesh, context.plan.tp)
        wide = x.is_floating_point() and x.dtype not in HALF.values()
        return x.new_empty(shape, dtype=context.carried if wide else x.dtype)

    precision, device = context.plan.precision, context.device.type
    carries = [distinct(carry) for carry in boundaries(model, context.blocks, sample, precision, device)]
    packed = [(tuple(map(crossing, once)), places) for once, places in carries]
    stages, length = range(len(context.placement)), len(context.blocks)
    ends = [i for i in stages if (i + 1) % length and (i in owned or i + 1 in owned)]
    return {i: Wire(mesh.pp, mesh.pp_back, *packed[i % length]) for i in ends}

"""The space that `plan` searches: every legal mesh of a cluster, and on each the other keys of a plan.

By default these are the keys that this version trains; with all_keys those that can be priced. Keys that change what
is computed (precision, sync, codec) stay as they are held. Every device of the cluster is used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Annotated, Any

from unisono.config import Loaded
from unisono.config.resolve import on_any_ranks
from unisono.plan import Plan
from unisono.plan.checks import batch_of, divisors
from unisono.plan.grammar import known
from unisono.plan.grid import Grid
from unisono.planner.clusters import cluster
from unisono.planner.from_recipe import assuming, judged, length, serving, unplayed
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import Model, attending, kind
from unisono.planner.search_arrays import Axes, like
from unisono.planner.source import Source
from unisono.planner.stack import Stack, stack
from unisono.planner.timetables import chunks, serves
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import ConfigProblems, UsageError

_FILLS = "eight of cuBLAS's largest tiles, of 256 rows each; with fewer a rank's products are those of small batches"
# Positions that a rank of cp has at least in what is searched without all keys.
LONG: Annotated[int, Source("specification", _FILLS)] = 2048
_TRIED = (
    "a choice of ours: one chunk hides nothing, two at most half of a message, four at most three quarters"
)
# Numbers of chunks of `tp` that are tried. Meshes are screened with the most.
CHUNKS: Annotated[tuple[int, ...], Source("specification", _TRIED)] = (1, 2, 4)
_WIDTH = "P15"  # a precision beside weights of another width


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched. held: the plan that gives everything that is not, and the keys that it says. batch: samples of
    a step. micro_batch: the recipe's, or None. legal: what else a plan must be. all_keys: keys too that change more
    than how work is split. steps: of the run. assumed: what nobody named and was taken, in words. unplayed: what of the
    recipe `train` cannot play, in words. by_sample: see `PlanRequest`. besides: (plan, its micro-batch) on so many
    devices that are priced in any case."""

    model: Model
    cluster: Cluster
    stack: Stack
    batch: int
    micro_batch: int | None
    held: Plan
    legal: Callable[[Plan], bool] = lambda plan: True
    all_keys: bool = False
    steps: int = 0
    assumed: tuple[str, ...] = ()
    unplayed: tuple[str, ...] = ()
    besides: Callable[[int], Iterable[tuple[Plan, int]]] = lambda devices: ()
    by_sample: bool = False


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Sizes of the axes (a plan, other keys not read), and what is combined on them. count: plans that exist."""

    plan: Plan
    axes: Axes
    count: int


def meshes(space: Space) -> Iterator[MeshSizes]:
    """Yield every legal way to spread the devices over the axes."""
    model, world = space.model, space.cluster.devices
    for tp in _values(space, "tp", divisors(world)):
        if world % tp or model.n_head % tp or model.kv_heads % tp:
            continue
        for cp in _values(space, "cp", _contexts(space, world // tp)):
            if world % (tp * cp) or model.context % (tp * cp):
                continue
            for pp in _values(space, "pp", divisors(world // (tp * cp))):
                if pp > model.n_layer or world % (tp * cp * pp):
                    continue
                yield from _data(space, {"tp": tp, "cp": cp, "pp": pp})


def _contexts(space: Space, ranks: int) -> Sequence[int]:
    """Return degrees of cp: with all keys any, else those that leave each rank enough positions for efficient
    products."""
    every = divisors(ranks)
    if space.all_keys or attending(space.model) is None:
        return every if space.all_keys else (1,)
    return [cp for cp in every if cp == 1 or space.model.context >= cp * LONG]


def plans(mesh: MeshSizes, n_layer: int) -> Iterator[tuple[Plan, int]]:
    """(plan, its micro-batch): all of one mesh, in the order of the screen's arrays."""
    return (plan_at(mesh, at) for at in places(mesh, n_layer))


def places(mesh: MeshSizes, n_layer: int) -> Iterator[tuple[int, ...]]:
    """Where there are plans in the screen's arrays."""
    served = mesh.axes.served(mesh.plan.pp, n_layer)
    for at in product(*(range(size) for size in mesh.axes.shape)):
        if served[at[2], at[4]]:
            yield at


def plan_at(mesh: MeshSizes, at: Sequence[int]) -> tuple[Plan, int]:
    """(plan, its micro-batch) at a place of the screen's arrays."""
    axes = mesh.axes
    micro_batch, micros = axes.sizes[at[2]]
    named: dict[str, Any] = {
        "zero": axes.zeros[at[0]], "recompute": axes.modes[at[1]], "micros": micros,
        "cp_kind": axes.kinds[at[3]], "schedule": axes.schedules[at[4]],
    }  # fmt: skip
    said = frozenset({*named, "dp", "shard", "tp", "pp", "cp", "ep"})
    return replace(mesh.plan, **named, said=said), micro_batch


def _data(space: Space, inner: dict[str, int]) -> Iterator[MeshSizes]:
    left = space.cluster.devices // prod(inner.values())
    for shard in _values(space, "shard", divisors(left)):
        if left % shard or space.batch % left:
            continue
        if "dp" in space.held.said and space.held.dp not in (-1, left // shard):
            continue
        for ep in _experts(space, inner["tp"] * inner["cp"] * shard):
            sized = like(space.held, **inner, shard=shard, dp=left // shard, ep=ep)
            for plan in (in_chunks(sized, CHUNKS[-1]), sized) if overlaps(space, sized) else (sized,):
                if sizes := tuple(_sizes(space, plan, space.batch // left)):
                    break
            else:
                continue
            axes = _axes(space, plan, sizes)
            served = int(axes.served(plan.pp, space.model.n_layer).sum())
            others = len(axes.zeros) * len(axes.modes) * len(axes.kinds)
            if served:
                yield MeshSizes(plan, axes, served * others)


def overlaps(space: Space, plan: Plan) -> bool:
    """Whether products of `tp` may go in chunks, behind which our own runs hide its messages, and nobody has said."""
    ours = space.stack.autograd and attending(space.model) is not None
    return ours and plan.tp > 1 and not isinstance(plan.tp, Grid) and "tp" not in space.held.said


def in_chunks(plan: Plan, count: int) -> Plan:
    """The plan with products of `tp` in so many chunks."""
    options = {text for text in plan.options if not text.startswith("tp=")}
    return like(plan, options=frozenset((*options, *([f"tp={plan.tp}:chunks={count}"] if count > 1 else ()))))


def _experts(space: Space, ranks: int) -> Sequence[int]:
    """Return degrees of ep, which re-uses the ranks of a replica."""
    every = divisors(space.model.holders(ranks))
    return [ep for ep in _values(space, "ep", every) if ranks % ep == 0]


def _axes(space: Space, plan: Plan, sizes: tuple[tuple[int, int], ...]) -> Axes:
    zeros = _values(space, "zero", (1, 2, 3) if plan.shard > 1 else (space.held.zero,))
    model = space.model
    every = space.all_keys and attending(model) is not None
    # Fused attention keeps no scores that selective recomputation could leave out.
    modes = ("none", *(("selective",) if every and not space.stack.fused_attention else ()), "full")
    if space.held.recompute != "auto":
        modes = _values(space, "recompute", modes)
    kinds = [space.held.cp_kind]
    if plan.cp > 1:
        spread = plan.tp * plan.cp
        whole = model.n_head % spread == 0 and model.kv_heads % spread == 0
        kinds = list(_values(space, "cp_kind", ("ring", "ulysses") if whole else ("ring",)))
    schedules = (
        _values(space, "schedule", _schedules(space, plan.pp)) if plan.pp > 1 else [space.held.schedule]
    )
    return Axes(
        zeros=tuple(zeros),
        modes=tuple(modes),
        sizes=sizes,
        kinds=tuple(kinds),
        schedules=tuple(schedules),
    )


def _schedules(space: Space, ranks: int) -> list[str]:
    """Timetables, those with several stages a rank for every number that cuts a row evenly."""
    names: list[str] = []
    for name in known("schedule"):
        if name not in SCHEDULES.names() or SCHEDULES.find(name).alone or not SCHEDULES.find(name).flushed:
            continue
        sizes = (
            divisors(-(-space.model.n_layer // ranks))[1:] if "v" in SCHEDULES.find(name).model_fields else ()
        )
        each = [f"{name}:v={v}" for v in sizes] if sizes else [name]
        names += [text for text in each if ranks * chunks(text) <= space.model.n_layer]
    return names


def _sizes(space: Space, plan: Plan, share: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, micros) that are legal on this mesh."""
    named: dict[str, Any] = {"zero": space.held.zero}
    if plan.pp > 1 and "schedule" not in space.held.said:
        named["schedule"] = "1f1b"
    for size in _micro_batches(space, share):
        if space.legal(like(plan, micros=share // size, **named)):
            yield size, share // size


def _values(space: Space, key: str, free: Sequence[Any]) -> Sequence[Any]:
    return (getattr(space.held, key),) if key in space.held.said else free


def _micro_batches(space: Space, share: int) -> Sequence[int]:
    if space.micro_batch is not None:
        return (space.micro_batch,) if share % space.micro_batch == 0 else ()
    if "micros" in space.held.said and space.held.micros:
        return (share // space.held.micros,) if share % space.held.micros == 0 else ()
    return divisors(share)


def space_of(
    loaded: Loaded, model: Model, held: str | None, cluster_name: str, software: Stack | None, all_keys: bool = False
) -> Space:  # fmt: skip
    """Return the space of a recipe on a cluster. held: keys that stay as it says. Raises UsageError."""
    where = cluster(cluster_name)
    keys = Plan.parse(held, where="flag --plan") if held else Plan()
    return space_on(loaded, model, keys, where, software or stack(where.stack), all_keys)


def space_on(
    loaded: Loaded, model: Model, held: Plan, where: Cluster, software: Stack, all_keys: bool = False
) -> Space:
    """Return the space of a cluster and of keys that are parsed already. The recipe's own plan gives its precision
    alone, since that changes what is computed. Raises ConfigProblems for held keys that no plan can be played with.
    """
    recipe = on_any_ranks(loaded.recipe)
    held, assumed = assuming(loaded, held, (where,))
    checked = judged(recipe, model)
    wrong = [p for p in held.check(checked) if p.code == _WIDTH]
    if wrong:
        raise ConfigProblems(wrong)

    def legal(plan: Plan) -> bool:
        return not kind(model).problems(model, plan) and not plan.check(checked)

    train, unable = recipe.train, unplayed(loaded)
    steps, more = length(loaded, model, where, train.global_batch)
    sizes = train.global_batch, train.micro_batch

    def besides(devices: int) -> Iterator[tuple[Plan, int]]:
        """The recipe's own plan, and what `train` does without one."""
        changes: dict[str, Any] = {key: held.text(key) for key in (*held.said, "precision", "sync", "codec")}
        for plan in (loaded.plan, Plan(dp=-1)):
            with suppress(UsageError):
                filled = replace(plan, **changes).fill(devices)
                batch, _ = batch_of(filled, train)
                if batch is None or filled.world != devices or not legal(filled):
                    continue
                if filled.pp == 1 or serves(filled.schedule, filled.pp, batch.micros, model.n_layer):
                    yield replace(filled, micros=batch.micros), batch.micro_batch

    return Space(
        model,
        serving(where, recipe),
        software,
        *sizes,
        held,
        legal,
        all_keys,
        steps,
        (*assumed, *more),
        unable,
        besides,
        by_sample=any(section.by_sample for section in recipe.sections()),
    )

"""Recipe + plan + this rank's place → a live run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.tree import TreeSum
from unisono.config import Recipe
from unisono.models.build import build as build_model
from unisono.models.init import draw, rules_of
from unisono.observe.span import Recorder
from unisono.parallel.play import StagePlayer
from unisono.parallel.precision import computing, dtype_of
from unisono.parallelize import parallelize
from unisono.plan import Plan
from unisono.programs.pipeline import Timetable, lower, part_of
from unisono.programs.schedules import SCHEDULES
from unisono.spec.model import Facts
from unisono.sync import POLICIES
from unisono.train.clip import ByRow, ByTensor
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Feed, leaves_of
from unisono.train.gradients import Gradients, LossPlaces
from unisono.train.optim._make import make
from unisono.train.step import Run
from unisono.train.update import Update


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands: its rank, the device it computes on, and how collectives are made."""

    rank: int
    world: int
    device: torch.device
    backend: str
    timeout: timedelta


def connect(place: Place, store: dist.Store | None) -> None:
    """Join the other ranks; a world of one joins nobody."""
    if place.world == 1:
        return
    device = place.device if place.backend == "nccl" else None
    dist.init_process_group(
        place.backend,
        rank=place.rank,
        world_size=place.world,
        timeout=place.timeout,
        device_id=device,
        store=store,
    )


def facts_of(corpus: Corpus) -> Facts:
    """What the data decides about the model."""
    return Facts(corpus.vocab, corpus.classes, corpus.sample_shape)


def timetable_of(plan: Plan) -> Timetable:
    """The lowered timetable of a resolved plan."""
    return lower(SCHEDULES.read(plan.schedule).timetable(plan.pp, plan.micros or 1))


def build(recipe: Recipe, plan: Plan, place: Place, corpus: Corpus, recorder: Recorder) -> Run:
    """A run at step 0. recipe and plan are resolved; every rank calls this together."""
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    policy = POLICIES.read(plan.sync)
    collective = COLLECTIVES.read(plan.collective)
    mesh = Mesh(shape, place.rank, recorder, place.timeout, policy.leafwise, collective)
    model = build_model(recipe.model, facts_of(corpus), seed=recipe.seed)
    values = initial_values(model, recipe.seed)
    train = recipe.train
    micro = train.micro_batch or 1
    dtype, timetable = dtype_of(plan.precision), timetable_of(plan)
    local = parallelize(
        model,
        plan,
        timetable,
        mesh,
        values,
        _sample(corpus, micro),
        dtype=dtype,
        device=place.device,
        leafwise=policy.leafwise,
        compiled=train.compile,
    )
    sync = policy.bind(local.slots, mesh.dp, None)
    leaves = train.global_batch // micro
    own, counted = own_leaves(mesh, leaves), mesh.tp.index == 0
    gradients = Gradients(
        local.slots,
        mesh.dp,
        sync,
        ties=local.ties,
        sharding=local.sharding,
        inner=mesh.over,
        trees={slot.name: TreeSum(plan.micros or 1) for slot in local.slots} if policy.leafwise else {},
        places=LossPlaces(leaves, own, counted) if policy.leafwise else LossPlaces(counted=counted),
    )
    row = mesh.at["pp"]
    return Run(
        mesh=mesh,
        local=local,
        player=StagePlayer(
            local.stages,
            local.wires,
            recorder,
            partial(computing, plan.precision, place.device),
            gradients.begin,
            gradients.leaf_done if policy.leafwise else None,
            dtype=dtype,
            device=place.device,
        ),
        timetable=timetable,
        row=timetable.rows[row],
        eval_row=part_of(timetable, lambda action: action.kind == "F").rows[row],
        sync=sync,
        gradients=gradients,
        measure=(ByRow if policy.leafwise else ByTensor)(local.shapes, mesh.replica, mesh.at),
        update=Update(
            make(train, local.slots, place.device, even=policy.leafwise),
            local.slots,
            train.rate(),
            train.clip,
        ),
        seed=recipe.seed,
        recorder=recorder,
    )


def initial_values(model: nn.Module, seed: int) -> Callable[[str], Tensor]:
    """name → full initial tensor: drawn by name for our models, as made for a user's own."""
    if any(p.is_meta for p in model.parameters()):
        rules = rules_of(model)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return lambda name: draw(name, shapes[name], rules[name], seed)
    made: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return lambda name: made[name]


def _sample(corpus: Corpus, micro_batch: int) -> Tensor:
    """A meta tensor like the inputs of one micro-batch."""
    inputs, _ = corpus.train.fetch(np.zeros(1, dtype=np.int64))
    return torch.empty((micro_batch, *inputs.shape[1:]), dtype=inputs.dtype, device="meta")


def own_leaves(mesh: Mesh, leaves: int) -> range:
    """The leaves of a step that this rank computes: a replica has a stretch of them, dealt out to its shards in turn.

    So the sum over shards of one micro-batch, and then over micro-batches, and then over replicas, is one tree.
    """
    stretch = leaves_of(mesh.dp.index, mesh.dp.size, leaves)
    return stretch[mesh.shard.index :: mesh.shard.size]


def feeds(recipe: Recipe, plan: Plan, mesh: Mesh, corpus: Corpus, device: torch.device) -> tuple[Feed, Feed]:
    """(training, validation) batches of this rank."""
    train = recipe.train
    micro = train.micro_batch or 1
    leaves = own_leaves(mesh, train.global_batch // micro)
    dtype = dtype_of(plan.precision)
    of = partial(
        Feed, global_batch=train.global_batch, micro_batch=micro, leaves=leaves, device=device, dtype=dtype
    )
    return (
        of(corpus.train, recipe.seed, origin=recipe.data.source),
        of(corpus.val, recipe.seed + 1, origin=recipe.data.source, repeat=True, prefetch=False),
    )

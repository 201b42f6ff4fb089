"""Recipe + plan + this rank's place → a live run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.device import has_numbers, is_apart
from unisono.comm.members import Shape, ordered
from unisono.comm.mesh import Mesh
from unisono.config import Recipe
from unisono.models.build import build as build_model
from unisono.models.init import draw, rules_of
from unisono.observe.span import Recorder
from unisono.parallel.offload.lending import send_home
from unisono.parallel.offload.streaming import stream
from unisono.parallel.precision import dtype_of
from unisono.parallelize import parallelize
from unisono.plan import Plan
from unisono.plan.away import away_of
from unisono.spec.model import Facts
from unisono.sync import POLICIES
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Feed, Permuted
from unisono.train.flow import KnownAhead, drains, unflushed
from unisono.train.join import Replica, join, timetable_of
from unisono.train.run import Run
from unisono.train.scaling import scaler_of
from unisono.train.update import update_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands: its rank, the device it computes on, and how collectives are made. scratch: a folder
    of the run's for what is offloaded to disk."""

    rank: int
    world: int
    device: torch.device
    backend: str
    timeout: timedelta
    scratch: Path | None = None


def connect(place: Place, store: dist.Store | None) -> None:
    """Join the other ranks; a world of one joins nobody."""
    if place.world == 1:
        return
    device = place.device if is_apart(place.device) else None
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
    return Facts(corpus.vocab, corpus.classes, corpus.sample_shape, corpus.rows)


def build(recipe: Recipe, plan: Plan, place: Place, corpus: Corpus, recorder: Recorder) -> Run:
    """A run at step 0 in which all ranks take part. recipe and plan are resolved. Every rank calls it, or it hangs."""
    replica = replica_of(recipe, plan, place, corpus, recorder)
    return join(replica, replica.mesh.members)


def replica_of(recipe: Recipe, plan: Plan, place: Place, corpus: Corpus, recorder: Recorder) -> Replica:
    """This rank's part of the model, with its optimiser, whoever takes part. Every rank calls it, or it hangs."""
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    policy = POLICIES.read(plan.sync)
    collective = COLLECTIVES.read(plan.collective)
    members = ordered(shape, filter(None, recipe.launch.order.split(",")))
    mesh = Mesh(shape, place.rank, recorder, place.timeout, policy.leafwise, collective, members)
    model = build_model(recipe.model, facts_of(corpus), seed=recipe.seed, loss=recipe.train.loss)
    values = initial_values(model, recipe.seed, place.device)
    train, dtype = recipe.train, dtype_of(plan.precision)
    micro = train.micro_batch or 1
    local = parallelize(
        model,
        plan,
        timetable_of(plan),
        mesh,
        values,
        _sample(corpus, micro),
        dtype=dtype,
        device=place.device,
        leafwise=policy.leafwise,
        virtual=policy.virtual,
        compiled=train.compile,
        scratch=place.scratch,
    )
    scaler = scaler_of(plan.precision, plan.arithmetic, place.device)
    update = update_of(train, local.slots, place.device, even=policy.leafwise, scaler=scaler)
    away = away_of(plan)
    if away.params:
        send_home([slot.live for slot in local.slots], local.store)
    if away.optimizer:
        stream(update.optimizer, local.store)
    return Replica(plan, mesh, local, update, train.global_batch, micro, dtype, recipe.seed, recorder)


def initial_values(model: nn.Module, seed: int, device: torch.device) -> Callable[[str], Tensor]:
    """name → full initial tensor: drawn by name for our models, as made for a user's own; without numbers on a device
    that has none."""
    if not has_numbers(device):
        whole = {name: p.detach().to(device) for name, p in model.named_parameters()}
        return lambda name: whole[name]
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


def feeds(recipe: Recipe, plan: Plan, corpus: Corpus, device: torch.device) -> tuple[Feed, Permuted]:
    """(training, validation) batches."""
    train = recipe.train
    of = partial(
        Permuted,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch or 1,
        device=device,
        dtype=dtype_of(plan.precision),
    )
    schedule = unflushed(plan)
    read = of(corpus.train, recipe.seed, origin=recipe.data.source)
    return (
        KnownAhead(read, schedule.ahead(plan.pp), drains(train)) if schedule else read,
        of(corpus.val, recipe.seed + 1, origin=recipe.data.source, repeat=True, prefetch=False),
    )

"""Recipe + plan + this rank's place → a live run."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.device import beside_cpus, has_numbers, of_rank
from unisono.comm.group import Group
from unisono.comm.members import Shape, ordered
from unisono.comm.mesh import Mesh
from unisono.config import LaunchConfig, Recipe, TrainConfig
from unisono.models.build import build as build_model
from unisono.models.cut_chain import InferredChain
from unisono.models.init import Rule, draw, rules_of
from unisono.models.lora import adapt, choose, plain
from unisono.observe.span import Recorder
from unisono.parallel.offload.param_streaming import send_home
from unisono.parallel.offload.streaming import stream
from unisono.parallel.precision import dtype_of
from unisono.parallel.stochastic import Dither
from unisono.parallelize import Local, parallelize
from unisono.plan import Plan
from unisono.spec.beside import BesideRanks
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed, sister
from unisono.spec.model import Facts, OwnModel
from unisono.spec.section import Section
from unisono.spec.sink import Observer, RunFacts
from unisono.spec.training import LOSSES
from unisono.sync import POLICIES, Policy, SampleLane
from unisono.sync._outer import MailboxPlace
from unisono.train.build.pretrained import beginning
from unisono.train.build.stepped_by import stepped_by
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.filtered import FilteredFeed
from unisono.train.step.join import Replica, join, measure_of, timetable_of
from unisono.train.step.overlap import drains, unflushed
from unisono.train.step.run import Run
from unisono.train.step.scaling import scaler_of
from unisono.train.step.update import NormsOver, update_of

HOUR = 3600.0
"""Seconds for which a run waits for others at most, where the user has set no deadline."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among the ranks: its rank, the device it computes on, and how collectives are made. scratch: a folder
    of the run's for what is offloaded to disk. speeds: of the replicas, by which leaves are dealt; alike if empty.
    host: the first rank of this host. beside: how to reach processes beside the ranks, where the run can have some."""

    rank: int
    world: int
    device: torch.device
    backend: str
    timeout: timedelta
    scratch: Path | None = None
    speeds: tuple[float, ...] = ()
    host: int = 0
    beside: BesideRanks | None = None


def place_of(rank: int, world: int, local_rank: int, backend: str, timeout: float) -> Place:
    """A rank's device: its own GPU under NCCL, the CPU under Gloo."""
    return Place(rank, world, of_rank(backend, local_rank), backend, timedelta(seconds=timeout))


def connect(place: Place, store: dist.Store | None, present: int | None = None) -> None:
    """Join the other ranks; a world of one joins nobody. present: how many meet, if more than train."""
    if (present or place.world) == 1:
        return
    # No `device_id`: with one, each new group of NCCL is split off the world's, which takes all ranks of the world, and
    # here its members alone make a group.
    dist.init_process_group(
        beside_cpus(place.backend),
        rank=place.rank,
        world_size=present or place.world,
        timeout=place.timeout,
        store=store,
    )


def facts_of(corpus: Corpus) -> Facts:
    """What the data decides about the model."""
    return Facts(corpus.vocab, corpus.classes, corpus.sample_shape, corpus.rows)


def model_of(recipe: Recipe, corpus: Corpus) -> nn.Module:
    """The whole model that a recipe trains, uncut: with its adapters, and with what does not learn marked so. Raises
    UsageError and UserCodeError as `models.build.build` does."""
    train = recipe.train
    whole = "adapters are put beside its modules" if train.lora_rank else ""
    model = build_model(recipe.model, facts_of(corpus), seed=recipe.seed, loss=train.loss, whole=whole)
    if train.lora_rank:
        adapt(model, train.lora_rank, train.lora_alpha or 2.0 * train.lora_rank, train.lora_targets)
    if train.lora_rank or train.freeze or train.train_only:
        choose(model, train.freeze, train.train_only)
    return model


def build(
    recipe: Recipe, plan: Plan, place: Place, corpus: Corpus, recorder: Recorder, *, filled: bool = True
) -> Run:
    """A run at step 0 in which all ranks take part. recipe and plan are resolved. filled: see `replica_of`. Every rank
    calls it, or it hangs."""
    replica = replica_of(recipe, plan, place, corpus, recorder, filled=filled)
    return join(replica, replica.mesh.members, place.speeds or None)


def replica_of(
    recipe: Recipe, plan: Plan, place: Place, corpus: Corpus, recorder: Recorder, *, filled: bool = True
) -> Replica:
    """This rank's part of the model, with its optimiser, whoever takes part. filled: with the weights that the recipe
    begins from, where it names some; else they are drawn, and a checkpoint replaces them. Every rank calls it, or it
    hangs."""
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    policy = POLICIES.read(plan.sync)
    collective = COLLECTIVES.read(plan.collective)
    members = ordered(shape, filter(None, recipe.launch.order.split(",")))
    mesh = Mesh(shape, place.rank, recorder, place.timeout, policy.leafwise, collective, members)
    model = model_of(recipe, corpus)
    if isinstance(recipe.model, OwnModel) and has_numbers(place.device):
        check_same(model, mesh.world, place.device)
    values = initial_values(model, recipe.seed, place.device)
    steps = stepped_by(recipe.train, model)
    begin = beginning(recipe.model, model, values) if filled and has_numbers(place.device) else None
    train, dtype = recipe.train, dtype_of(plan.precision)
    micro = train.micro_batch or 1
    local = parallelize(
        model,
        plan,
        timetable_of(plan),
        mesh,
        values if begin is None else None,
        sample_of(corpus, micro),
        dtype=dtype,
        device=place.device,
        leafwise=policy.leafwise,
        virtual=policy.virtual,
        compiled=train.compile,
        scratch=place.scratch,
    )
    rate = filter(None, [recipe.train.scaling()])
    local = replace(local, notes=(*local.notes, *steps, *rate))
    if begin is not None:
        begin.fill(local.slots, local.owners)
    _teach(recipe, plan, mesh, local, place, corpus)
    scaler = scaler_of(plan.precision, plan.arithmetic, place.device)
    dither = Dither(recipe.seed, local.owners)
    norms = _norms_of(train, policy, mesh, local, place.device)
    update = update_of(
        train, local.slots, place.device, even=policy.leafwise, scaler=scaler, dither=dither, norms=norms
    )
    lent = [slot.live for slot in local.slots if local.away[slot.name].params]
    if lent:
        send_home(lent, local.store)
    # Weights that are at home are stepped where their numbers are, so their state is brought with them.
    streamed = [slot.master for slot in local.slots if local.away[slot.name].optimizer]
    if streamed:
        stream(update.optimizer, streamed, local.store)
    return Replica(
        plan, mesh, local, update, train.global_batch, micro, dtype, recipe.seed, recorder, train.steps,
        recipe.launch.servers or 1, _mailbox_of(recipe.launch),
        _changes_of(recipe, corpus), place.beside,
    )  # fmt: skip


def _changes_of(recipe: Recipe, corpus: Corpus) -> tuple[Callable[[Run], Run], ...]:
    """What sections of the recipe and its optimiser change of a live run."""
    changes = [
        live.around(section, recipe, corpus)
        for section, live in _live_sections(recipe)
        if hasattr(live, "around")
    ]
    chosen = recipe.train.optimiser()
    if chosen.observed:
        changes.append(contributed("unisono.train.build.layer_products").observe)
    if chosen.paced:
        changes.append(contributed("unisono.train.build.adascale").around(recipe))
    return tuple(changes)


def judges_of(recipe: Recipe) -> list[tuple[Section, ModuleType]]:
    """Sections that judge validations, each with the module that does so."""
    return [(section, live) for section, live in _live_sections(recipe) if hasattr(live, "judge")]


def observers_of(recipe: Recipe, run: RunFacts) -> list[Observer]:
    """The observers that sections of the recipe bring, on rank 0."""
    live = ((section, live) for section, live in _live_sections(recipe) if hasattr(live, "observer"))
    return [module.observer(section, run) for section, module in live]


def _norms_of(
    train: TrainConfig, policy: Policy, mesh: Mesh, local: Local, device: torch.device
) -> NormsOver | None:
    """What adds up norms over the ranks of this replica, for an optimiser that needs them."""
    if not train.optimiser().norms:
        return None
    whole_norms = contributed("unisono.train.step.whole_norms").WholeNorms
    return partial(whole_norms, by=measure_of(policy, local, mesh), owners=local.owners, device=device)


def _live_sections(recipe: Recipe) -> list[tuple[Section, ModuleType]]:
    """Sections of the recipe that change how a run trains, each with the module that does so."""
    modules = ((section, sister(f"{__package__}.{section.name}")) for section in recipe.sections())
    return [(section, module) for section, module in modules if module is not None]


def _mailbox_of(launch: LaunchConfig) -> MailboxPlace | None:
    """Where this run meets others, if it does."""
    if launch.mailbox is None or launch.peer is None:
        return None
    return MailboxPlace(
        launch.mailbox, launch.peer, launch.peers, launch.quorum, launch.quorum_grace, launch.peer_timeout,
        launch.timeout or HOUR,
    )  # fmt: skip


def _teach(recipe: Recipe, plan: Plan, mesh: Mesh, local: Local, place: Place, corpus: Corpus) -> None:
    """Put the teacher beside this rank's stages, where the loss learns from one."""
    if not recipe.train.loss or (teaching := LOSSES.read(recipe.train.loss).teaching()) is None:
        return
    teacher = contributed("unisono.train.build.teacher")
    sample, dtype = sample_of(corpus, recipe.train.micro_batch or 1), dtype_of(plan.precision)
    beside = teacher.TeacherSite(
        plan, mesh, sample, dtype, place.device, facts_of(corpus),
        lambda model: initial_values(model, recipe.seed, place.device),
    )  # fmt: skip
    teacher.teach(local, teaching, recipe.model, beside)


def initial_values(model: nn.Module, seed: int, device: torch.device) -> Callable[[str], Tensor]:
    """name → full initial tensor: drawn by name for our models, as made for a user's own; without numbers on a device
    that has none."""
    adapters: Mapping[str, Rule] = getattr(model, "adapters", {})
    if isinstance(model, InferredChain):  # no second copy: its values move out of it
        return _values_of(model.emptied(), adapters, seed)
    if not has_numbers(device):
        whole = {name: p.detach().to(device) for name, p in model.named_parameters()}
        return lambda name: whole[name]
    if any(p.is_meta for p in model.parameters()):
        rules = rules_of(model)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return lambda name: draw(plain(name), shapes[name], rules[name], seed)
    return _values_of({name: p.detach().clone() for name, p in model.named_parameters()}, adapters, seed)


def _values_of(
    values: Mapping[str, Tensor], adapters: Mapping[str, Rule], seed: int
) -> Callable[[str], Tensor]:
    """The values that the user's function made, by name; adapters, which it knows nothing of, are drawn."""
    return lambda name: (
        draw(name, tuple(values[name].shape), adapters[name], seed) if name in adapters else values[name]
    )


def sample_of(corpus: Corpus, micro_batch: int) -> Tensor:
    """A meta tensor like the inputs of one micro-batch."""
    inputs, _ = corpus.train.fetch(np.zeros(1, dtype=np.int64))
    return torch.empty((micro_batch, *inputs.shape[1:]), dtype=inputs.dtype, device="meta")


def feeds(
    recipe: Recipe,
    plan: Plan,
    corpus: Corpus,
    device: torch.device,
    lane: SampleLane = SampleLane(),
    kept: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[FilteredFeed, Permuted]:
    """(training, validation) batches. lane: which ones are this run's; validation is the same for all. kept: the run's
    `Update.keeps`, for batches whose sizes a run decides; without them these have the first size."""
    train = recipe.train
    of = partial(
        Permuted,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch or 1,
        device=device,
        dtype=dtype_of(plan.precision),
    )
    schedule = unflushed(plan)
    turn, place = divmod(lane.place, lane.count)
    usual = partial(
        of, corpus.train, recipe.seed + turn, origin=recipe.data.source, every=lane.count, first=place
    )
    special = (
        live.batches(section, recipe, plan, corpus.train, device, kept)
        for section, live in _live_sections(recipe)
        if hasattr(live, "batches")
    )
    read = next((feed for feed in special if feed is not None), None) or usual()
    return (
        FilteredFeed(read, schedule.ahead(plan.pp), drains(train)) if schedule else FilteredFeed(read),
        of(corpus.val, recipe.seed + 1, origin=recipe.data.source, repeat=True, prefetch=False),
    )


def check_same(model: nn.Module, world: Group, device: torch.device) -> None:
    """Raises UsageError L05 on every rank where some have other parameters, or another cut of the graph, than most.

    A user's function is called on every rank, and its module is traced there. One that looks at an environment, or goes
    through a set, may come out differently. All ranks of the world call it, or it hangs.
    """
    cut = {name: list(names) for name, names in getattr(model, "cut_names", {}).items()}
    shapes = [(name, list(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    said = json.dumps([shapes, cut])
    mine = int.from_bytes(blake2b(said.encode(), digest_size=7).digest(), "little")
    digests = world.all_gather(torch.tensor([mine], device=device)).tolist()
    usual, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, digest in zip(world.ranks, digests, strict=True) if digest != usual]
    if odd:
        raise UsageError(
            f"rank {odd[0]} made another model of model.kind than most ranks did, or cut its graph in another way",
            where="model.kind",
            likely="its function depends on the environment, on the host's files, or on the order of a set",
            fix="a function that returns the same module on every rank",
            code="L05",
        )

"""What of a run is kept in checkpoints: pieces under full logical names."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.params import Slot, dense_of
from unisono.spec.words import whole
from unisono.train.state.checkpoint import Box, load, tensor_names
from unisono.train.state.checkpoint.faults import misfit
from unisono.train.state.checkpoint.read import AVERAGE
from unisono.train.step.batch_norm import changed_buffers
from unisono.train.step.run import Run
from unisono.train.step.update import held_for_all, state_of


def pieces_of(
    run: Run, gradients: bool = False, center: Mapping[str, Tensor] = MappingProxyType({})
) -> list[Box]:
    """Parameters and optimiser state of this rank as boxes of logical tensors, routers' votes, gradients if asked.

    Names: `model/NAME`, `optim/NAME/KEY`, `ema/NAME`, `grad/NAME`. An alias of a tied weight appears under its owner's
    name and is loaded, never saved. Where replicas have weights of their own, `model/NAME` is `center`, or what the
    policy keeps as such, and each replica's own weights and states are `replica/REPLICA/model/NAME` and so on beside.
    """
    pieces: list[Box] = []
    first_replica, center = run.mesh.at["dp"] == 0, center or run.sync.outer
    for slot in run.local.slots:
        counted = slot.counted(run.mesh.at)
        pieces += _boxes_of(run, slot, center.get(slot.name), counted, first_replica)
        if not run.sync.equal and run.sync.keeps_weights and not run.sync.one_copy:
            boxes = _boxes_of(run, slot, None, counted, True)
            pieces += (replace(box, name=f"{_replica(run)}{box.name}") for box in boxes)
        name = run.local.owners.get(slot.name, slot.name)
        if (average := run.update.averages.get(slot.name)) is not None:
            pieces.append(Box(AVERAGE + name, slot.shape, slot.start, average, counted and first_replica))
        if gradients and slot.master.grad is not None:
            grad = dense_of(slot.master.grad)
            pieces.append(Box(f"grad/{name}", slot.shape, slot.start, grad, counted and first_replica))
    first = not any(run.mesh.at[axis] for axis in ("dp", "shard", "cp", "tp"))
    for i, stage in run.local.stages.items():
        for name, buffer in changed_buffers(stage, run.local.routers).items():
            counted = first and i < run.timetable.length
            pieces.append(Box(f"model/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer, counted))
    return pieces


def _replica(run: Run) -> str:
    """What the names of this replica's own boxes begin with."""
    return f"replica/{run.mesh.at['dp']}/"


def _boxes_of(run: Run, slot: Slot, weights: Tensor | None, counted: bool, first: bool) -> Iterator[Box]:
    """The boxes of one parameter and of its optimiser state. weights: in the place of this rank's own. first: whether
    this replica's are saved."""
    saved, alone = counted and first, held_for_all(run.update.optimizer, slot.master)
    name = run.local.owners.get(slot.name, slot.name)
    yield Box(
        f"model/{name}", slot.shape, slot.start, at_home(slot.master) if weights is None else weights, saved
    )
    for key, value in state_of(run.update.optimizer, slot.master).items():
        if alone is not None:
            keeps = not slot.alias and not slot.copy and (first or alone)
            yield Box(f"optim/{name}/{key}", tuple(value.shape), (0,) * value.dim(), value, keeps)
        elif value.dim() == 0:  # a step counter: one for the tensor, kept by whoever holds its first element
            keeps = saved and not any(slot.start) and slot.master.numel() > 0
            yield Box(f"optim/{name}/{key}", (), (), value, keeps)
        else:
            yield Box(f"optim/{name}/{key}", slot.shape, slot.start, value, saved)


def changed_within(run: Run) -> str:
    """What of `pieces_of` and `kept_of` a step changes before its update, in words; "" where that is nothing, so that
    they can be saved in the middle of a step as the last one left them."""
    if not run.sync.equal:
        return "replicas have weights of their own, and those of the run take an exchange"
    if run.sync.state():
        return "the policy's own state changes within a step"
    if run.gradients.overlap:
        return "weights change within a step"
    if run.local.store.most:
        return "what is put away moves within a step"
    if any(changed_buffers(stage, run.local.routers) for stage in run.local.stages.values()):
        return "statistics of the model change within a step"
    return ""


def kept_of(run: Run) -> list[Box]:
    """What the policy keeps between steps, as `sync/KEY`, or `sync/REPLICA/KEY` where replicas keep each their own; and
    the loss's scale, as `scaler/KEY`, and what the update keeps, as `update/KEY`."""
    run.sync.await_transfers()
    return [*numbers_of(run), *(box for _, box in _kept(run, run.sync.state()))]


def numbers_of(run: Run) -> list[Box]:
    """The scale of the loss and numbers of the update: all ranks have the same ones, and the first writes them."""
    first = not any(run.mesh.at.values())
    kept = (("scaler", run.update.scaler.state()), ("update", run.update.keeps))
    return [
        Box(f"{kind}/{key}", (), (), value, first) for kind, state in kept for key, value in state.items()
    ]


class StateSource(Protocol):
    """A source of a run's state: a checkpoint, or the memory of the other ranks."""

    def names(self) -> set[str]:
        """The names of all tensors that it has."""
        ...

    def load(self, boxes: Sequence[Box]) -> dict[str, Any]:
        """Fill these boxes' tensors in place; returns what was kept beside them, `step` among it."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as a source."""

    folder: Path

    def names(self) -> set[str]:
        return set(tensor_names(self.folder))

    def load(self, boxes: Sequence[Box]) -> dict[str, Any]:
        return load(self.folder, boxes)


def restore(run: Run, folder: Path) -> dict[str, Any]:
    """Fill the run from a checkpoint, its step too; returns the saved state. Raises UsageError as `load` does; K03
    too where a plain module was cut in another way, for its rows may then lie in another order under the same names."""
    if run.local.cut_names:
        _check_cut(run.local.cut_names, load(folder, []).get("cut_names"), folder)
    return refill(run, Stored(folder))


def refill(run: Run, source: StateSource) -> dict[str, Any]:
    """Fill the run from a source, its step too; returns what was kept beside. What policy or scale keep and the source
    does not have, as of a replica that is new, stays as it is. Raises what the source raises."""
    run.sync.await_transfers()
    state, known = dict(run.sync.state()), source.names()
    dealt = run.sync.shares and _replicas(known) not in (set(), set(range(_keepers(run))))
    kept = [
        (key, box)
        for key, box in _kept(run, state)
        if box.name in known and not (dealt and run.sync.is_private(key))
    ]
    scale = [box for box in numbers_of(run) if box.name in known]
    second = [] if dealt else _second_uses(run, state, known)
    saved = source.load([*_wanted(run, known), *scale, *(box for _, box in (*kept, *second))])
    if not run.sync.equal:
        _take_center(run, known)
    _begin_averages(run, known)
    for key, box in second:
        state[key].add_(box.tensor)
    shared = _deal_anew(run, source, state, known) if dealt else []
    run.sync.load({key: state[key] for key in (*(key for key, _ in kept), *shared)})
    run.step = int(saved.get("step", run.step))
    run.sync.agree()
    return saved


def _wanted(run: Run, known: set[str]) -> list[Box]:
    """The boxes to fill. Of what a replica has for itself, its own where the source has that, else the run's."""
    prefix = _replica(run)
    boxes = [b for b in pieces_of(run) if b.name in known or not b.name.startswith(AVERAGE)]
    local = {
        box.name.removeprefix(prefix) for box in boxes if box.name.startswith(prefix) and box.name in known
    }
    outer = {f"model/{run.local.owners.get(name, name)}" for name in run.sync.outer}
    return [
        box
        for box in boxes
        if (box.name in known if box.name.startswith(prefix) else box.name not in local or box.name in outer)
    ]


@torch.no_grad()
def _take_center(run: Run, known: set[str]) -> None:
    """Weights of this replica's own that the source lacks become the run's, where the policy keeps those apart."""
    for slot in run.local.slots:
        name, outer = run.local.owners.get(slot.name, slot.name), run.sync.outer.get(slot.name)
        if outer is not None and f"{_replica(run)}model/{name}" not in known:
            slot.master.copy_(outer)


@torch.no_grad()
def _begin_averages(run: Run, known: set[str]) -> None:
    """Averages that the source lacks begin at the weights that it has."""
    for slot in run.local.slots:
        average = run.update.averages.get(slot.name)
        if average is not None and AVERAGE + run.local.owners.get(slot.name, slot.name) not in known:
            average.copy_(at_home(slot.master))


def _check_cut(now: Mapping[str, Sequence[object]], was: Mapping[str, Any] | None, folder: Path) -> None:
    """was: what the checkpoint says; nothing in one of a version that did not."""
    here = json.loads(json.dumps({name: list(names) for name, names in now.items()}))
    differ = sorted(n for n in here.keys() | (was or here).keys() if here.get(n) != (was or here).get(n))
    if differ:
        first = f"{differ[0]} is of another cut of the module's graph"
        raise misfit(folder, first, len(differ))


def _replicas(known: Iterable[str]) -> set[int]:
    """Numbers of the replicas that kept something of their own."""
    places = (name.split("/")[1] for name in known if name.startswith("sync/"))
    return {number for place in places if (number := whole(place)) is not None}


def _keepers(run: Run) -> int:
    """How many keep a part of a parameter's sum: each replica, and where the timetable has the model twice, each of its
    copies."""
    return run.mesh.dp.size * run.timetable.chains


def _deal_anew(run: Run, source: StateSource, state: Mapping[str, Tensor], known: set[str]) -> list[str]:
    """Fill what each replica keeps for itself with an equal share of what all replicas of the checkpoint kept, so that
    nothing of their sum is lost; returns its keys."""
    dealt: set[str] = set()
    for replica in sorted(_replicas(known)):
        sums = {key: torch.zeros_like(x) for key, x in state.items() if run.sync.is_private(key)}
        boxes = [(key, box) for key, box in _kept(run, sums, replica) if box.name in known]
        boxes += _second_uses(run, sums, known, replica)
        source.load([box for _, box in boxes])
        for key, box in boxes:
            state[key].zero_() if key not in dealt else None
            state[key].add_(box.tensor / _keepers(run))
            dealt.add(key)
    return sorted(dealt)


def _joined(run: Run) -> dict[str, str]:
    """Alias → owner of tied weights whose uses are added up on this rank before replicas meet: what is kept of them is
    kept of their sum, under the owner's name."""
    here, whole = {slot.name for slot in run.local.slots}, run.mesh.pp.size == 1
    return {
        alias: owner
        for alias, owner in run.local.owners.items()
        if owner in here and (alias in here or whole) and run.sync.shares and not run.gradients.trees
    }


def _second_uses(
    run: Run, state: Mapping[str, Tensor], known: set[str], replica: int | None = None
) -> list[tuple[str, Box]]:
    """Where the checkpoint has what was kept of a second use by itself, as stages keep it: (key of the owner's, a box
    that gets what is to be added to it)."""
    joined, second = _joined(run), []
    for key, box in _kept(run, state, replica):
        name, _, what = key.rpartition("/")
        for alias in (alias for alias, owner in joined.items() if owner == name and run.sync.adds(key)):
            other = box.name.replace(f"/{key}", f"/{alias}/{what}", 1)
            if other in known:
                second.append((key, replace(box, name=other, tensor=torch.zeros_like(box.tensor))))
    return second


def _kept(run: Run, state: Mapping[str, Tensor], replica: int | None = None) -> list[tuple[str, Box]]:
    """(key, box) of each: a box like its parameter's where the key begins with its name, else a whole tensor. What is
    kept of a parameter in another shape belongs to one box of it, which its name says. replica: whose, if not this
    rank's."""
    slots, at = {slot.name: slot for slot in run.local.slots}, run.mesh.at
    first = not any(index for axis, index in at.items() if axis != "dp")
    kept, joined = [], _joined(run)
    for key, value in state.items():
        slot, private = slots.get(key.rpartition("/")[0]), run.sync.is_private(key)
        if run.sync.adds(key) and slot is not None and slot.name in joined:
            continue
        twin = slot is not None and slot.copy and run.sync.shares
        place = at["dp"] + run.mesh.dp.size * twin if replica is None else replica
        prefix = f"sync/{place}" if private else "sync"
        writes = private or at["dp"] == 0
        if slot is not None and value.shape == slot.master.shape:
            # A second use of a tied weight, and a second copy of a stage (DualPipe), has gradients of its own, so what
            # is kept of them is its own too.
            wrote = replace(slot, alias=False, copy=slot.copy and not (private and twin)).counted(at)
            box = Box(f"{prefix}/{key}", slot.shape, slot.start, value, writes and wrote)
        else:
            name = f"{prefix}/{key}{_place(slot)}" + ("~copy" if twin else "")
            wrote = first if slot is None else replace(slot, alias=False, copy=False).counted(at)
            box = Box(name, tuple(value.shape), (0,) * value.dim(), value, writes and wrote)
        kept.append((key, box))
    return kept


def _place(slot: Slot | None) -> str:
    """Which box of a parameter this is, `@0,64x32,64`; "" of the whole."""
    if slot is None or slot.master.shape == slot.shape:
        return ""
    return f"@{','.join(map(str, slot.start))}x{','.join(map(str, slot.master.shape))}"

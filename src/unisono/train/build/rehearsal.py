"""One rank of a plan by itself, on the meta device: its real code, without its numbers and without the other ranks.

    with imagined(17, 4096) as calls:
        found = rehearse(recipe, plan, corpus, 17, calls)

A plan of thousands of ranks is looked at so in seconds: what a rank holds, how much of it lives at once, what it calls
in which order, and where it waits for a number of its device. Numbers that it waits for are answered with what an
ordinary step would have: nothing lacks, nothing overflows.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from unisono.comm.device import IMAGINED, META, has_numbers
from unisono.comm.group import Group
from unisono.comm.imagined import TIMEOUT, Made
from unisono.config import Recipe
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.train.build.build import Place, build
from unisono.train.build.known_shapes import KnownShapes
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Micro
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step

_aten = torch.ops.aten


@dataclass(slots=True)
class Rehearsed:
    """What one rank did in one rehearsed step.

    at: its place on each axis. stages: numbers of its stages. parameters: elements that it holds. lasting, peak:
    bytes of tensors between steps, and at most during the step. calls: in order. waits: places in the code that wait
    for a number of the device, and how often. strays: places that make tensors elsewhere than on the device. notes:
    parts of the step that were left out.
    """

    at: dict[str, int]
    stages: tuple[int, ...]
    parameters: int
    lasting: int
    peak: int
    calls: list[Made]
    waits: Counter[str] = field(default_factory=Counter)
    strays: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    def sums(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, operation) → (how often, bytes of the whole tensors)."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for call in self.calls:
            if call.op != "arrived":
                times, nbytes = totals.get((call.axis, call.op), (0, 0))
                totals[call.axis, call.op] = times + 1, nbytes + call.nbytes
        return totals


class Onlooker(TorchDispatchMode):
    """Counts bytes of meta tensors that are alive, and sees waits and strays while `stepping`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.stepping = False
        self.waits: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._shapes = KnownShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _leaves_for_host(func, args):  # where nobody waits for it
            return None if isinstance(args[0], list | tuple) else args[0]
        answer = self._answer(func, args, kwargs)
        if answer is not None:
            return answer
        out = self._shapes.call(func, args, kwargs)
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self._look(func, x)
        return out

    def _look(self, func: Any, x: Tensor) -> None:
        if x.device.type != META:
            if self.stepping and x.numel() > 1:
                self.strays[f"{place()} ({func.__name__})"] += 1
            return
        if x.layout != torch.strided:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the number that a wait gets; None for any other operation."""
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        of_device = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == META
        if name in ("_local_scalar_dense", "equal", "is_nonzero") and of_device:
            self._waited()
            if name != "_local_scalar_dense":
                return name == "equal"
            usual = 1.0 if _in_optimiser() else 0.0  # it counts steps, and divides by what has been counted
            return usual if args[0].is_floating_point() else int(usual)
        to = kwargs.get("device")
        if name == "_to_copy" and of_device and to is not None and has_numbers(torch.device(to)):
            self._waited()
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return None

    def _waited(self) -> None:
        if self.stepping:
            self.waits[place()] += 1


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _leaves_for_host(func: Any, args: Any) -> bool:
    """Whether this is a copy from tensors without numbers, one or a list, into such that have some."""
    if getattr(getattr(func, "overloadpacket", None), "__name__", "") not in ("copy_", "_foreach_copy_"):
        return False
    to, source = (x[0] if isinstance(x, list | tuple) else x for x in args[:2])
    return isinstance(source, Tensor) and source.is_meta and not to.is_meta


def _in_optimiser() -> bool:
    return any("/torch/optim/" in frame.f_code.co_filename for frame in _frames())


def place() -> str:
    """Where in this program a tensor is worked on: `train/step/grad_norm.py in _read`."""
    for frame in _frames():
        _, ours, name = frame.f_code.co_filename.rpartition("/unisono/")
        if ours and name != "train/build/rehearsal.py":
            return f"{name} in {frame.f_code.co_name}"
    return "elsewhere"


@contextmanager
def _as_if_there() -> Iterator[None]:
    """While this lasts, FSDP2 takes parameters of the meta device as it takes those of any other."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    checked = FSDPParamGroup._validate_no_meta_params
    FSDPParamGroup._validate_no_meta_params = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup._validate_no_meta_params = checked  # type: ignore[method-assign]


def rehearse(
    recipe: Recipe, plan: Plan, corpus: Corpus, rank: int, calls: list[Made], steps: int = 1
) -> Rehearsed:
    """Build this rank and play `steps` steps of it. Return what it did in the last one.

    recipe and plan are resolved. calls: the list that `comm.imagined.imagined` fills.
    """
    place_ = Place(rank, plan.world, torch.device(META), IMAGINED, TIMEOUT)
    watching = Onlooker()
    with _as_if_there(), watching:
        run = build(recipe, plan, place_, corpus, Recorder(rank))
        leaves, notes = _leaves(run, corpus), _left_out(run)
        for _ in range(steps):
            calls.clear()
            watching.waits.clear()
            watching.strays.clear()
            lasting = watching.peak = watching.now
            watching.stepping = True
            if notes:
                run.player.play(run.row, leaves, 1.0, run.seed)
            else:
                train_step(run, leaves)
            watching.stepping = False
    names = _axes(run)
    named = [replace(call, axis=names.get(call.group, call.group)) for call in calls]
    return Rehearsed(
        at=dict(run.mesh.at),
        stages=tuple(run.local.stages),
        parameters=sum(slot.master.numel() for slot in run.local.slots if not slot.alias),
        lasting=lasting,
        peak=watching.peak,
        calls=named,
        waits=watching.waits,
        strays=watching.strays,
        notes=notes,
    )


def _left_out(run: Run) -> tuple[str, ...]:
    """What only numbers decide."""
    notes = []
    if any(slot.sparse for slot in run.local.slots):
        notes.append(
            "which rows of a table have gradients is known from numbers alone: passes, and no update"
        )
    return tuple(notes)


def _leaves(run: Run, corpus: Corpus) -> Sequence[Micro]:
    """Micro-batches of this rank, of shapes alone."""
    inputs, targets = corpus.train.fetch(np.zeros(1, dtype=np.int64))
    batch, dtype = run.replica.micro_batch, run.replica.dtype

    def like(x: Tensor) -> Tensor:
        kind = dtype if x.is_floating_point() else x.dtype
        return torch.empty((batch, *x.shape[1:]), dtype=kind, device=META)

    samples = torch.empty(batch, dtype=torch.int64, device=META)
    return [Micro(like(inputs), like(targets), samples) for _ in run.leaves]


def _axes(run: Run) -> dict[str, str]:
    """Name of a process group → name of its axis."""
    groups = [*vars(run.mesh).values(), *run.mesh._over.values(), *(tie.group for tie in run.local.ties)]
    groups.append(run.local.mirror.group)
    live = [group for group in groups if isinstance(group, Group) and group.pg is not None]
    return {group.pg.group_name: group.axis for group in live if group.pg is not None}

"""One step of one run, written down by every rank and put together again by one.

Each rank writes what it holds as boxes of logical tensors, copies included, because whether copies agree is part of the
proof. Files are safetensors; facts that are no tensors go into their metadata as JSON.

Keys are `KIND/NAME` or `optim/NAME/STATE`, with kinds in the order of a step:

    init    parameters before the first step
    raw     gradients of the global batch, before clipping
    grad    the same after clipping
    model   parameters after the update
    optim   the optimiser's tensors after the update
    ema     averages of parameters over updates, where the run keeps some
    buffer  buffers of the modules
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.params import Slot, dense_of
from unisono.parallel.player import Leaf
from unisono.train.step.run import Run
from unisono.train.step.update import held_for_all, state_of
from unisono.verify.evidence import RecordedBox, copies_of, joined

KINDS = ("init", "raw", "grad", "model", "optim", "ema", "buffer")


@dataclass(slots=True)
class Note:
    """What one rank has to say about a step, besides tensors.

    leaves: what it computed, in order; each has `first` (global position of its first sample), `samples`, `inputs`
    and `targets` (hashes), `count` (targets), `loss` (× weight), `size` (of what it is a sum of,
    × weight, see `Player.watch_sizes`) and `ended`: whether its loss was computed here.
    """

    rank: int
    at: dict[str, int]
    last: bool
    loss: float = 0.0
    norm: float = 0.0
    lr: float = 0.0
    finite: bool = True
    targets: int = 0
    leaves: list[dict[str, Any]] = field(default_factory=list)


class Observed:
    """Collects one rank's tensors and note of one step; `write` puts them on disk."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.note = Note(run.mesh.rank, dict(run.mesh.at), run.local.holds_loss)
        self.last_stages = frozenset(i for i, stage in run.local.stages.items() if stage.last)
        self._boxes: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._step, self._begun = -1, 0

    def keep(self, kind: str) -> None:
        """Copies of this rank's tensors of one kind, as they are now."""
        for slot in self._run.local.slots:
            if kind in ("raw", "grad"):
                if slot.master.grad is not None:
                    self._put(f"{kind}/{slot.name}", slot, dense_of(slot.master.grad))
            elif kind == "optim":
                whole = held_for_all(self._run.update.optimizer, slot.master) is not None
                for key, value in state_of(self._run.update.optimizer, slot.master).items():
                    if whole:
                        self._store(f"optim/{slot.name}/{key}", tuple(value.shape), (0,) * value.dim(), value)
                    else:
                        self._put(f"optim/{slot.name}/{key}", slot, value)
            elif kind == "ema":
                if (average := self._run.update.averages.get(slot.name)) is not None:
                    self._put(f"ema/{slot.name}", slot, average)
            else:
                self._put(f"{kind}/{slot.name}", slot, at_home(slot.master))

    def keep_buffers(self) -> None:
        """Buffers of this rank's modules; they are whole."""
        for stage in self._run.local.stages.values():
            for name, buffer in stage.named_buffers():
                self._store(f"buffer/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer)

    def begin(self, _: Sequence[Leaf]) -> None:
        """A step begins, perhaps once more: under fp16 one that overflowed is played again, and its first leaves were
        in vain."""
        step = self._run.step
        if step != self._step:
            self._step, self._begun = step, len(self.note.leaves)
        del self.note.leaves[self._begun :]

    def leaf(self, leaf: Leaf) -> None:
        """One micro-batch that is about to be computed."""
        samples = leaf.samples.cpu()
        fact = {
            "first": int(samples[0]) if len(samples) else -1,
            "samples": digest(samples),
            "inputs": digest(leaf.inputs),
            "targets": digest(leaf.targets),
            "count": leaf.targets.numel(),
        }
        self.note.leaves.append(fact)

    def _put(self, key: str, slot: Slot, value: Tensor) -> None:
        if value.dim() == 0 and slot.shape:
            self._store(key, (), (), value)
        else:
            self._store(key, slot.shape, slot.start, value)

    def _store(self, key: str, shape: tuple[int, ...], start: tuple[int, ...], value: Tensor) -> None:
        self._shapes[key] = shape
        self._boxes[f"{key}@{','.join(map(str, start))}"] = value.detach().to("cpu", copy=True).contiguous()

    def write(self, folder: Path) -> None:
        """One file for this rank. Small tensors by the hundred cost more than their bytes, so they lie end to end in
        one tensor for each dtype, and `boxes` says where."""
        folder.mkdir(parents=True, exist_ok=True)
        boxes: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        runs: dict[str, list[Tensor]] = defaultdict(list)
        length: dict[str, int] = defaultdict(int)
        for label, box in self._boxes.items():
            dtype = str(box.dtype)
            boxes[label] = (dtype, length[dtype], tuple(box.shape))
            runs[dtype].append(box.reshape(-1))
            length[dtype] += box.numel()
        names = ("rank", "at", "last", "loss", "norm", "lr", "finite", "targets", "leaves")
        about = {"note": {n: getattr(self.note, n) for n in names}, "shapes": self._shapes, "boxes": boxes}
        flats = {dtype: torch.cat(parts) for dtype, parts in runs.items()}
        save_file(flats, folder / f"rank-{self.note.rank}.safetensors", {"about": json.dumps(about)})


def digest(x: Tensor) -> str:
    """Eight hex digits of a tensor's bytes, on any device."""
    return blake2b(x.detach().cpu().contiguous().numpy().tobytes(), digest_size=4).hexdigest()


class Record:
    """One step of one run, read back."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, list[RecordedBox]] = defaultdict(list)
        self.notes: list[Note] = []
        for path in sorted(folder.glob("rank-*.safetensors"), key=lambda p: int(p.stem.split("-")[1])):
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                note = Note(**about["note"])
                self.notes.append(note)
                self.shapes.update({key: tuple(shape) for key, shape in about["shapes"].items()})
                flats = {dtype: file.get_tensor(dtype) for dtype in file.keys()}  # noqa: SIM118  (not a dict)
                for label, (dtype, first, shape) in about["boxes"].items():
                    key, _, start = label.rpartition("@")
                    at = tuple(int(n) for n in start.split(",") if n)
                    box = flats[dtype][first : first + math.prod(shape)].view(shape)
                    self.parts[key].append(RecordedBox(note.rank, note.at, at, box))
        self._wholes: dict[str, Tensor | None] = {}
        self._moments: dict[str, list[str]] = {}
        for key in self.names("optim"):
            self._moments.setdefault(key.rpartition("/")[0], []).append(key)

    def names(self, kind: str) -> list[str]:
        """All keys of a kind."""
        return [key for key in self.parts if key.startswith(f"{kind}/")]

    def moments(self, name: str) -> list[str]:
        """All keys of a parameter's optimiser state."""
        return self._moments.get(f"optim/{name}", [])

    def whole(self, key: str) -> Tensor | None:
        """The full tensor, each box from the first rank that holds it; None if a box is missing."""
        if key not in self._wholes:
            self._wholes[key] = joined(self.parts.get(key, ()), self.shapes.get(key, ()))
        return self._wholes[key]

    def with_tensors(self, wholes: Mapping[str, Tensor], norm: float) -> "Record":
        """A copy that has these tensors whole, each in the dtype of its own, and this norm."""
        other = copy(self)
        other._wholes = {}
        other.notes = [replace(self.notes[0], norm=norm), *self.notes[1:]]
        other.parts = self.parts | {
            key: [RecordedBox(0, self.notes[0].at, (0,) * x.dim(), x.to(self.parts[key][0].tensor.dtype))]
            for key, x in wholes.items()
            if key in self.parts
        }
        return other

    def copies(self, key: str) -> list[list[RecordedBox]]:
        """The boxes of a tensor, each with all ranks that hold it."""
        return copies_of(self.parts.get(key, ()))

    def leaves(self) -> dict[int, list[dict[str, Any]]]:
        """First position → what was computed for it, once for each data rank that did. Losses are those of the last
        stage, over all positions; other ranks of a replica repeat the leaf without adding to the count."""
        leaves_of: dict[int, dict[tuple[int, int], dict[int, list[dict[str, Any]]]]] = defaultdict(dict)
        for note in self.notes:
            if note.last and note.at["tp"] == 0:
                place = (note.at["dp"], note.at["shard"])
                # Batches of random size may leave some empty, which nobody computes.
                for leaf in (leaf for leaf in note.leaves if leaf["ended"] and leaf["count"]):
                    leaves_of[leaf["first"]].setdefault(place, {}).setdefault(note.at["cp"], []).append(leaf)
        return {first: _over_positions(by.values()) for first, by in leaves_of.items()}


def _over_positions(by: Iterable[Mapping[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The leaf of each data rank, first those that it computed first. by: its ranks of `cp`, each of which has the loss
    of some positions."""
    times = [list(zip(*ranks.values(), strict=False)) for ranks in by]
    parts = [parts_at[0] for parts_at in times] + [more for parts_at in times for more in parts_at[1:]]
    return [{**part[0], "loss": sum(leaf["loss"] for leaf in part)} for part in parts]

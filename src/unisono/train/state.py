"""What of a run is kept in checkpoints: pieces under full logical names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unisono.models.unit import GraphUnit
from unisono.parallel.offload.lending import at_home
from unisono.parallel.params import dense_of
from unisono.train.checkpoint import Box, load, tensor_names
from unisono.train.run import Run
from unisono.train.update import state_of


def pieces_of(run: Run, gradients: bool = False) -> list[Box]:
    """Parameters and optimiser state of this rank as boxes of logical tensors, routers' votes, gradients if asked.

    Names: `model/NAME`, `optim/NAME/KEY`, `grad/NAME`. An alias of a tied weight appears under its owner's name and
    is loaded, never saved.
    """
    pieces: list[Box] = []
    first_replica = run.mesh.at["dp"] == 0
    for slot in run.local.slots:
        name = run.local.owners.get(slot.name, slot.name)
        saved = slot.counted(run.mesh.at) and first_replica
        pieces.append(Box(f"model/{name}", slot.shape, slot.start, at_home(slot.master), saved))
        for key, value in state_of(run.update.optimizer, slot.master).items():
            if (
                value.dim() == 0
            ):  # a step counter: one for the tensor, kept by whoever holds its first element
                keeps = saved and not any(slot.start) and slot.master.numel() > 0
                pieces.append(Box(f"optim/{name}/{key}", (), (), value, keeps))
            else:
                pieces.append(Box(f"optim/{name}/{key}", slot.shape, slot.start, value, saved))
        if gradients and slot.master.grad is not None:
            grad = dense_of(slot.master.grad)
            pieces.append(Box(f"grad/{name}", slot.shape, slot.start, grad, saved))
    first = not any(run.mesh.at[axis] for axis in ("dp", "shard", "cp", "tp"))
    for i, stage in run.local.stages.items():
        written = _written(stage)
        kept = [
            pair
            for pair in stage.named_buffers()
            if pair[0].rpartition(".")[0] in run.local.routers or pair[0] in written
        ]
        for name, buffer in kept:
            counted = first and i < run.timetable.length
            pieces.append(Box(f"model/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer, counted))
    return pieces


def _written(stage: nn.Module) -> set[str]:
    """Buffers that a step changes, such as the running statistics of batch norms."""
    return {
        f"{name}.{buffer}"
        for name, module in stage.named_modules()
        if isinstance(module, GraphUnit)
        for buffer in module.written
    }


def kept_of(run: Run) -> list[Box]:
    """What the policy keeps between steps, as `sync/KEY`, or `sync/REPLICA/KEY` where replicas keep each their own; and
    the loss's scale, as `scaler/KEY`."""
    return [*_scale_of(run), *(box for _, box in _kept(run, run.sync.state()))]


def _scale_of(run: Run) -> list[Box]:
    """The same on all ranks, so the first writes it."""
    first = not any(run.mesh.at.values())
    return [Box(f"scaler/{key}", (), (), value, first) for key, value in run.update.scaler.state().items()]


def restore(run: Run, folder: Path) -> dict[str, Any]:
    """Fill the run from a checkpoint, its step too; returns the saved state. What policy or scale keep
    and the checkpoint does not have, as of a replica that is new, stays as it is. Raises UsageError as `load` does."""
    state, known = dict(run.sync.state()), set(tensor_names(folder))
    kept = [(key, box) for key, box in _kept(run, state) if box.name in known]
    scale = [box for box in _scale_of(run) if box.name in known]
    saved = load(folder, [*pieces_of(run), *scale, *(box for _, box in kept)])
    run.sync.load({key: state[key] for key, _ in kept})
    run.step = int(saved.get("step", run.step))
    return saved


def _kept(run: Run, state: Mapping[str, Tensor]) -> list[tuple[str, Box]]:
    """(key, box) of each: a box like its parameter's where the key begins with its name, else a whole tensor."""
    slots, at = {slot.name: slot for slot in run.local.slots}, run.mesh.at
    prefix = f"sync/{at['dp']}" if run.sync.private else "sync"
    writes = run.sync.private or at["dp"] == 0
    first = not any(index for axis, index in at.items() if axis != "dp")
    kept = []
    for key, value in state.items():
        slot = slots.get(key.rpartition("/")[0])
        if slot is not None and value.shape == slot.master.shape:
            box = Box(f"{prefix}/{key}", slot.shape, slot.start, value, writes and slot.counted(at))
        else:
            box = Box(f"{prefix}/{key}", tuple(value.shape), (0,) * value.dim(), value, writes and first)
        kept.append((key, box))
    return kept

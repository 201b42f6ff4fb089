"""What of a run is kept in checkpoints: pieces under full logical names."""

from unisono.train.checkpoint import Box
from unisono.train.optim._make import state_of
from unisono.train.step import Run


def pieces_of(run: Run, gradients: bool = False) -> list[Box]:
    """Parameters and optimiser state of this rank as boxes of logical tensors, gradients too if asked.

    Names: `model/NAME`, `optim/NAME/KEY`, `grad/NAME`. An alias of a tied weight appears under its owner's name and
    is loaded, never saved.
    """
    pieces: list[Box] = []
    first_replica = run.mesh.at["dp"] == 0
    for slot in run.local.slots:
        name = run.local.owners.get(slot.name, slot.name)
        saved = slot.counted(run.mesh.at) and first_replica
        pieces.append(Box(f"model/{name}", slot.shape, slot.start, slot.master.detach(), saved))
        for key, value in state_of(run.update.optimizer, slot.master).items():
            if (
                value.dim() == 0
            ):  # a step counter: one for the tensor, kept by whoever holds its first element
                keeps = saved and not any(slot.start) and slot.master.numel() > 0
                pieces.append(Box(f"optim/{name}/{key}", (), (), value, keeps))
            else:
                pieces.append(Box(f"optim/{name}/{key}", slot.shape, slot.start, value, saved))
        if gradients and slot.master.grad is not None:
            pieces.append(Box(f"grad/{name}", slot.shape, slot.start, slot.master.grad, saved))
    return pieces

"""What a run on this rank holds between two steps, by kind."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def held_by(run: Any) -> dict[str, list[Tensor]]:
    """Tensors by the planner's kinds: params, optim, grads (their buffers), buffers of modules. run: a
    `train.step.run.Run`."""
    optimizer, gradients = run.update.optimizer, run.gradients
    partial = [bucket for _, group in gradients._partial for bucket in group]
    kinds: dict[str, list[Any]] = {
        "params": [x for slot in run.local.slots for x in (slot.master, slot.live)]
        + [p for group in optimizer.param_groups for p in group["params"]],
        "optim": [x for state in optimizer.state.values() for x in state.values()],
        "grads": [bucket.flat for bucket in (*gradients._early, *gradients._late, *partial)],
        "buffers": [b for stage in run.local.stages.values() for b in stage.buffers()],
    }
    return {kind: [x for x in tensors if isinstance(x, Tensor)] for kind, tensors in kinds.items()}


def held_bytes(run: Any) -> dict[str, int]:
    """Bytes of their storages by kind; one that several tensors look at counts once, under its first kind. What is
    offloaded lies elsewhere and does not count."""
    seen: set[int] = set()
    return {
        kind: sum(
            storage.nbytes()
            for x in tensors
            for storage in _storage(x)
            if not run.local.store.holds(x)
            and not (storage.data_ptr() in seen or seen.add(storage.data_ptr()))
        )
        for kind, tensors in held_by(run).items()
    }


def _storage(x: Tensor) -> Iterator[Any]:
    try:
        storage = x.untyped_storage()
    except NotImplementedError:  # a DTensor: its local part is the master
        return
    if storage.data_ptr():
        yield storage

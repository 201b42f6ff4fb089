"""What a run on this rank holds between two steps, by kind."""

from typing import Any

from torch import Tensor

from unisono.parallel.params import local_of


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
    return {kind: [local_of(x) for x in tensors if isinstance(x, Tensor)] for kind, tensors in kinds.items()}


def held_bytes(run: Any) -> dict[str, int]:
    """Bytes of their storages by kind; one that several tensors look at counts once, under its first kind. What is
    offloaded lies elsewhere and does not count."""
    seen: set[int] = set()
    sums: dict[str, int] = {}
    for kind, tensors in held_by(run).items():
        sums[kind] = 0
        for x in tensors:
            try:
                storage = x.untyped_storage()
            except NotImplementedError:  # of a layout that has none of its own, as sparse ones
                continue
            if storage._cdata not in seen and not run.local.store.holds(x):
                seen.add(storage._cdata)
                sums[kind] += storage.nbytes()
    return sums

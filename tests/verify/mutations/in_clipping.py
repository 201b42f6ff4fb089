"""The norm of the whole model, and scaling by it."""

import torch

from tests.verify.mutations.planting import bug
from unisono.parallel.params import values_of
from unisono.train.step import update
from unisono.train.step.grad_norm import ByTensor, clip

SQUARES, STEP = ByTensor._squares, update.clip_and_step


def line_of(measure, held, extra):
    """The line of a measure over these slots' gradients, whether they count or not."""
    empty = torch.zeros(measure.length, dtype=torch.float64, device=extra.device)
    grads = [values_of(slot.master.grad) for slot in held]
    return torch.cat((measure._squares(held, grads, empty) if held else empty, extra))


def only_matrices(measure, held, tensors, empty):
    """Squares without those of vectors."""
    pairs = [(slot, x) for slot, x in zip(held, tensors, strict=True) if len(slot.shape) > 1]
    return SQUARES(measure, [slot for slot, _ in pairs], [x for _, x in pairs], empty) if pairs else empty


def _local(self, slots, extra):
    held = [
        s for s in slots if s.counted(self.rank_at) and s.master.grad is not None and s.master.grad.numel()
    ]
    line = line_of(self, held, torch.zeros_like(extra))
    return [line.sum().sqrt().item(), *self.replica.all_reduce(extra.double().clone()).tolist()]


@bug("shard=2", "partial_norm")
def norm_of_own_shard(patch):
    """Each rank clips by the norm of its shard."""
    patch(ByTensor, "__call__", _local)


@bug("pp=2", "partial_norm")
def norm_of_own_stage(patch):
    """Each stage clips by its own norm."""
    patch(ByTensor, "__call__", _local)


@bug("tp=2", "partial_norm")
def norm_of_own_slices(patch):
    """Each tensor-parallel rank clips by the norm of its slices."""
    patch(ByTensor, "__call__", _local)


@bug("tp=2", "norm_counted_twice")
def norm_counts_whole_tensors_on_every_rank(patch):
    """Tensors that tensor parallelism leaves whole enter the norm once for each rank."""

    def everything(self, slots, extra):
        held = [s for s in slots if not s.alias and s.master.grad is not None and s.master.grad.numel()]
        line = line_of(self, held, extra)
        self.replica.all_reduce(line)
        return self.read(line)

    patch(ByTensor, "__call__", everything)


@bug("dp=2", "norm_counted_twice")
def norm_over_replicas_too(patch):
    """Replicas hold equal gradients, and the norm is summed over them."""
    call = ByTensor.__call__
    patch(
        ByTensor, "__call__", lambda self, slots, extra: [(n := call(self, slots, extra))[0] * 2**0.5, *n[1:]]
    )


@bug("dp=2", "partial_norm")
def norm_forgets_vectors(patch):
    """Biases and norms belong to another parameter group, and the norm is taken over one."""
    patch(ByTensor, "_squares", only_matrices)


@bug("dp=2", "clipping")
def clipped_twice(patch):
    """The trainer clips and the optimiser wrapper clips again by the norm before."""

    def twice(optimizer, slots, norm, limit):
        clip(slots, norm, limit)
        STEP(optimizer, slots, norm, limit)

    patch(update, "clip_and_step", twice)


@bug("dp=2", "clipping")
def never_clipped(patch):
    """Clipping is configured and not called."""
    patch(update, "clip_and_step", lambda optimizer, slots, norm, limit: optimizer.step())


@bug("dp=2", "clipping")
def each_tensor_clipped_alone(patch):
    """Clipping by the norm of each tensor instead of the model's."""

    def alone(optimizer, slots, norm, limit):
        for s in slots:
            if s.master.grad is not None:
                s.master.grad.mul_(min(1.0, 0.1 * limit / (s.master.grad.norm().item() + 1e-6)))
        optimizer.step()

    patch(update, "clip_and_step", alone)

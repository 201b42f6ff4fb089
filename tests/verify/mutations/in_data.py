"""What goes in: samples, their order, initial values, randomness."""

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from tests.verify.mutations.planting import bug
from unisono import parallelize
from unisono.models.noise import Dropout, Noise
from unisono.parallel import cut
from unisono.parallel.fill import fill
from unisono.train.build import build
from unisono.train.data import dataset
from unisono.train.data.feed import Permuted
from unisono.train.step import join

LEAVES_OF, INITIAL, SAMPLES_AT, FETCH = (
    join.leaves_of,
    build.initial_values,
    dataset.samples_at,
    Permuted.fetch,
)
DROP, BITS = Dropout.forward, Dropout.bits


def rank() -> int:
    return dist.get_rank()


@bug("dp=2", "leaf_twice")
def every_rank_reads_the_same_data(patch):
    """A sampler that was not told its rank; the loss looks right."""
    patch(join, "leaves_of", lambda stretches, mesh: stretches[0])


@bug("dp=2", "leaf_twice")
def duplicated_leaf(patch):
    """A micro-batch handed out twice at the seam of two ranks' shares."""

    def overlapping(stretches, mesh):
        leaves, early = LEAVES_OF(stretches, mesh), mesh.rank == 1
        return range(leaves.start - early, leaves.stop - early)

    patch(join, "leaves_of", overlapping)


@bug("dp=2", "wrong_samples")
def shuffled_by_rank(patch):
    """Each rank shuffles with its own seed: samples repeat and are missed."""
    patch(build, "Permuted", lambda data, seed, **more: Permuted(data, seed + rank(), **more))


@bug("shard=2", "wrong_samples")
def sample_index_overflows(patch):
    """An index kept in too few bits wraps around in a large data set (here: 8 bits)."""

    def narrow(seed, positions, samples):
        return SAMPLES_AT(seed, positions, samples).astype(np.int8).astype(np.int64) % samples

    patch(dataset, "samples_at", narrow)


@bug("dp=2", "wrong_samples")
def targets_not_shifted(patch):
    """Labels already shifted by the loader and not by the model, or the other way round."""

    def fetch(self, step, leaves):
        return [replace(leaf, targets=leaf.inputs) for leaf in FETCH(self, step, leaves)]

    patch(Permuted, "fetch", fetch)


@bug("dp=2", "wrong_samples")
def resumed_one_step_late(patch):
    """After a restart the loader is one step ahead of the optimiser."""
    patch(Permuted, "fetch", lambda self, step, leaves: FETCH(self, step + 1, leaves))


@bug("dp=2", "initialisation")
def initialised_by_rank(patch):
    """Ranks seeded differently, and nothing broadcast."""
    patch(build, "initial_values", lambda model, seed, device: INITIAL(model, seed + rank(), device))


@bug("tp=2", "initialisation")
def slices_begin_alike(patch):
    """Every tensor-parallel rank draws its slice from the same generator, so slices are copies of each other."""

    def first_slice(stages, context):
        fill(
            stages, replace(context, cuts={name: replace(cut, start=0) for name, cut in context.cuts.items()})
        )

    passes = [replace(one, apply=first_slice) if one.name == "fill" else one for one in parallelize.PASSES]
    patch(parallelize, "PASSES", passes)


@bug("dp=2", "masks_differ")
def dropout_seeded_by_rank(patch):
    """Dropout from the rank's own generator: the masks depend on the layout."""
    patch(
        Dropout,
        "bits",
        lambda self, shape, noise: BITS(self, shape, Noise(noise.seed + rank(), noise.samples)),
    )


@bug("tp=2", "masks_differ")
def dropout_same_on_every_slice(patch):
    """Tensor-parallel ranks draw equal masks for different heads and positions (Megatron needs a second generator)."""

    def own_counting(self, shape, noise):
        held, self.places = self.places, {}
        try:
            return BITS(self, shape, noise)
        finally:
            self.places = held

    patch(Dropout, "bits", own_counting)


@bug("pp=2", "masks_differ")
def dropout_seeded_by_stage(patch):
    """A pipeline stage that numbers its layers from zero gives two layers the same mask."""
    patch(cut.Stage, "forward", _shifted(cut.Stage.forward))


def _shifted(forward):
    def shifted(self, x, noise=None):
        return forward(
            self, x, noise and Noise(noise.seed + 7 * int(next(iter(self.blocks), 0)), noise.samples)
        )

    return shifted


@bug("recompute=full", "masks_differ")
def recompute_with_another_mask(patch):
    """Activation checkpointing that does not restore the generator: backward sees other masks than forward."""
    import torch

    def bits(self, shape, noise):
        again = torch._C._current_graph_task_id() != -1
        return BITS(self, shape, Noise(noise.seed + again, noise.samples))

    patch(Dropout, "bits", bits)


@bug("dp=2", "masks_differ")
def dropout_repeats_each_micro_batch(patch):
    """A generator reset for every micro-batch: all have the mask of the first."""
    patch(Dropout, "bits", lambda self, shape, noise: BITS(self, shape, Noise(noise.seed, noise.samples * 0)))

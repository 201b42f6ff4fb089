"""In the library way: the user's own loop, and what `prepare` has put around it."""

from tests.verify.mutations import loops
from tests.verify.mutations.planting import bug
from unisono.library import batch_sharding, job
from unisono.library.current_batch import CurrentBatch
from unisono.library.gradients import Averaging, LoopGradients
from unisono.library.job import Job
from unisono.parallel import shard
from unisono.sync.every_step import EveryStepSync

FETCHED, SCATTER = CurrentBatch.fetched, shard.ShardScatter.__call__


@bug("dp=3", "factor", loop=loops.plain)
def uneven_shares_weigh_alike(patch):
    """The mean of the ranks' means, whatever number of samples each has."""

    def fetched(self, *given):
        FETCHED(self, *given)
        self.current.ratio = 1.0

    patch(CurrentBatch, "fetched", fetched)


@bug("dp=3", "factor_of_axis", loop=loops.even)
def replicas_added_and_not_averaged(patch):
    """Each rank's loss is a mean over its samples, and the gradients are added."""
    patch(Averaging, "grad_ready", EveryStepSync.grad_ready)


@bug("shard=3", "factor_of_axis", loop=loops.even)
def shards_added_and_not_averaged(patch):
    """The same where reduce-scatter adds."""

    def weigh(self, grad):
        self._begin()
        grad.mul_(self._batch.ratio)

    patch(LoopGradients, "_weigh", weigh)


@bug("dp=4", "not_reduced", loop=loops.accumulating)
def what_was_held_back_never_meets(patch):
    """No backward is the last, and at the step nobody asks what is still to be exchanged, nor what no backward made."""
    patch(LoopGradients, "catch_up", lambda self: None)
    patch(LoopGradients, "meet_others", lambda self, looking: None)


@bug("dp=2 shard=2", "factor", "factor_of_axis", loop=loops.clipped)
def clipped_by_the_norm_over_replicas_too(patch):
    """Replicas have equal gradients, and their squares are added."""
    real = job.clip
    patch(job, "clip", lambda slots, norm, limit: real(slots, norm * 2**0.5, limit))


@bug("dp=3", "forward", "told", loop=loops.batched)
def batch_norm_over_own_samples(patch):
    """A norm that should see the global batch sees a rank's samples."""
    patch(job, "join_batches", lambda model, group, current_batch: None)


@bug("dp=4", "leaf_twice", loop=loops.even)
def every_rank_has_the_first_samples(patch):
    """A loader that was not told its rank."""
    real = batch_sharding.part
    patch(batch_sharding, "part", lambda count, index, size: real(count, 0, size))


@bug("dp=3", "factor", loop=loops.padded)
def padding_counts(patch):
    """Each rank's mean is over the targets that count, and ranks are weighed by samples (as transformers' trainer did
    with micro-batches, issue 34191)."""
    patch(Job, "weigh", lambda self, count: None)


@bug("dp=2", "factor", "gradient", loop=loops.looking_ahead)
def the_batch_fetched_last_says_what_counts(patch):
    """A rank's weight is that of the batch that came last, though an earlier one is used."""
    patch(CurrentBatch, "_of", lambda self, inputs: self._recent[-1])


@bug("shard=4", "permuted", loop=loops.even)
def shards_have_their_neighbours_rows(patch):
    """Reduce-scatter hands each rank the next one's part."""

    def call(self, output_tensor, input_tensor, group, op, async_op=False):
        part = len(input_tensor) // self.group.size
        SCATTER(self, output_tensor, input_tensor.roll(part, 0), group, op, async_op)

    patch(shard.ShardScatter, "__call__", call)


@bug("dp=3", "forward", "refused", loop=loops.seeded_by_rank)
def weights_stay_each_ranks_own(patch):
    """Nothing is broadcast, and ranks were seeded differently."""
    patch(job, "spread", lambda tensors, group: None)

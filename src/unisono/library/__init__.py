"""The library way: the user's own loop on several ranks, in three lines.

    import unisono
    job = unisono.init(plan="dp=2")
    model, optimizer, data = job.prepare(model, optimizer, data)

Taken away, these lines leave a script for one device, and the two compute the same: `data` keeps its meaning as
the stream of *global* batches and yields this rank's part of each, the loss stays a mean over the samples at hand, and
gradients after `backward` are those of the mean over the global batch.

batch_sharding, join: data · gradients, sharding: how ranks meet · randomness · state: checkpoints · notices: what
differs from one device, seen by first_steps and batch_tracer · loop_check, gradient_check: proofs
"""

from unisono.library.enter import init
from unisono.library.job import Job

__all__ = ["Job", "init"]

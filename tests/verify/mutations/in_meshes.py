"""Under two or three axes at once: what is right along each of them alone, and wrong where they meet."""

from dataclasses import replace

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.in_updates import after, params
from tests.verify.mutations.planting import WIDE, bug
from unisono import parallelize
from unisono.comm.mesh import Mesh
from unisono.models.noise import Dropout
from unisono.parallel import tensor
from unisono.parallel.params import slots_of
from unisono.parallel.shard import Sharded
from unisono.parallel.ties import Tie
from unisono.sync import canonical
from unisono.sync.every_step import EveryStepSync
from unisono.train.step import join, update
from unisono.train.step.numbers import LossPlaces

READY, JOIN, BEFORE, BITS = EveryStepSync.grad_ready, Tie.join, Sharded.before_backward, Dropout.bits
PEERS, GROUP, GATHER, TREE = Mesh.peers, Mesh.group, tensor.gather_sequence, canonical.tree_sum
MAKE, MEET = update.make, Mesh._meet


def meets_where(chosen):
    """grad_ready, for the ranks that are chosen; the others keep what they have."""

    def ready(self, bucket):
        if chosen(rank()):
            READY(self, bucket)

    return ready


@bug("dp=2 pp=3", "not_reduced", recipe=WIDE)
def replicas_of_the_last_stage_never_meet(patch):
    """The group across replicas is made by the first stages alone."""
    patch(EveryStepSync, "grad_ready", meets_where(lambda r: r < 4))


@bug("dp=2 shard=3", "not_reduced", recipe=WIDE)
def one_shard_never_meets_its_replicas(patch):
    """The last of three shards is taken for padding."""
    patch(EveryStepSync, "grad_ready", meets_where(lambda r: r % 3 < 2))


@bug("dp=2 tp=4", "wrong_group", recipe=WIDE)
def cut_gradients_summed_over_tp_too(patch):
    """Every gradient is thought to be one rank's part of a sum, those of cut layers too."""
    patch(
        parallelize,
        "slots_of",
        lambda *given, **named: [
            replace(slot, sum_over=frozenset({"tp"})) for slot in slots_of(*given, **named)
        ],
    )


@bug("dp=2 shard=2", "replicas_drifted", "wrong_group", recipe=WIDE)
def replicas_meet_across_shards(patch):
    """Ranks are numbered in another order where replicas look for each other: first shards meet second ones."""

    def meet(self):
        MEET(self)
        self.dp = self.group_of("dp", [0, 3] if rank() in (0, 3) else [1, 2])

    patch(Mesh, "_meet", meet)


@bug("dp=3 pp=2", "tied_use_missing", "replicas_drifted", recipe=WIDE)
def ties_joined_in_the_first_replica_alone(patch):
    """First and last stage know of each other in one replica, and the others have no such group."""

    def joined(self):
        return min(self.group.ranks) % 3 == 0 and JOIN(self)

    patch(Tie, "join", joined)


@bug("dp=2 shard=2 pp=2", "loss_reduction", recipe=WIDE)
def numbers_added_over_replicas_instead_of_stages(patch):
    """Loss and squares of the norm are added over all ranks that hold the same stage."""

    def group(self, name, axes):
        return GROUP(self, name, ("dp", "shard", "cp", "tp") if name == "replica" else axes)

    patch(Mesh, "group", group)


@bug("dp=4 tp=2", "loss_reduction", recipe=WIDE)
def losses_of_all_tp_ranks_counted(patch):
    """Ranks of a cut layer have the same losses, and all of them are added."""
    patch(join, "LossPlaces", lambda *given, counted: LossPlaces(*given))


@bug("tp=2 pp=3", "forward", recipe=WIDE)
def a_stage_gets_the_other_half_of_the_positions(patch):
    """The last stage's ranks are numbered the other way round: each gets its neighbour's positions."""

    def peers(self, axes):
        axes = tuple(axes)
        return PEERS(self, axes) if axes != ("pp",) else [0, 2, 5] if rank() in (0, 2, 5) else [1, 3, 4]

    patch(Mesh, "peers", peers)


@bug("shard=2 zero=1 pp=2", "missing_micro_batch", "missing_share", recipe=WIDE)
def shards_scatter_after_the_first_backward(patch):
    """In a pipeline the first backward of a stage is taken for its last: what comes later is never scattered."""

    def before(self, last):
        first = not getattr(self, "begun", False)
        self.begun = not last
        BEFORE(self, first)

    patch(Sharded, "before_backward", before)


@bug("dp=2 tp=2 pp=2", "masks_differ", recipe=WIDE)
def slices_masked_alike_on_the_second_stage(patch):
    """Behind a boundary between stages nobody tells dropout which slice it sees."""

    def bits(self, shape, noise):
        held, self.places = self.places, {} if rank() >= 4 else self.places
        try:
            return BITS(self, shape, noise)
        finally:
            self.places = held

    patch(Dropout, "bits", bits)


@bug("dp=3 pp=2 sync=canonical", "summation_order", recipe=WIDE)
def canonical_parts_begin_with_the_second(patch):
    """Parts of three replicas are added in the order of a ring: the same for two."""
    patch(canonical, "tree_sum", lambda parts: TREE([*parts[1:], parts[0]]))


@bug("dp=3 tp=2 recompute=full", "kept_activation", recipe=WIDE)
def computed_again_without_the_other_positions(patch):
    """What is computed again does not gather what other ranks have: each takes its own positions for all."""

    def gather(x, group, length):
        own = torch._C._current_graph_task_id() != -1 and x.requires_grad
        return torch.cat([x] * group.size, 1) if own else GATHER(x, group, length)

    patch(tensor, "gather_sequence", gather)


@bug("shard=4 pp=2", "rank_slice", recipe=WIDE)
def last_shards_do_not_decay(patch):
    """What decays is decided by the local rows, and the last ranks are thought to have none."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        for group in optimizer.param_groups if rank() % 4 == 3 else ():
            group["weight_decay"] = 0.0
        return optimizer

    patch(update, "make", make)


@bug("dp=2 tp=3", "replicas_drifted", recipe=WIDE)
def whole_tensors_drift_in_the_second_replica(patch):
    """A norm's weight, alike on three ranks of each replica, drifts on one of six."""

    def drift(optimizer):
        next(p for p in params(optimizer) if p.dim() == 1).add_(1e-10 * (rank() == 5))

    patch(update, "make", after(drift))


@bug("shard=2 tp=2", "initialisation", recipe=WIDE)
def shards_forget_what_tp_has_cut(patch):
    """Rows of a shard are counted from the beginning of the tensor, not from that of the slice."""

    def slots(stage, shapes, cuts, *rest, **named):
        whole = {name: replace(cut, start=0) if cut.dim == 0 else cut for name, cut in cuts.items()}
        return slots_of(stage, shapes, whole, *rest, **named)

    patch(parallelize, "slots_of", slots)

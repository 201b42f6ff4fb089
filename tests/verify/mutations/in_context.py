"""Positions dealt over cp: attention over other ranks' keys, its way back, masks, positions, and what is summed."""

from dataclasses import replace

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import WIDE, bug
from unisono import parallelize
from unisono.comm.mesh import Mesh
from unisono.models.gpt import net
from unisono.models.noise import Dropout
from unisono.parallel import online, positions
from unisono.parallel.attend.gather.live import Gathered
from unisono.parallel.attend.ring.live import Ring, start_pass
from unisono.parallel.params import slots_of
from unisono.spec.layout import Places
from unisono.train.step import join
from unisono.train.step.numbers import LossPlaces
from unisono_contrib.parallel.attend.ulysses import live as ulysses

LONG = {**WIDE, "model.context": 24}
ROTATE, AT, TAKEN, BLOCK = net.rotate, Dropout.at, positions._taken, online.block
MEET, COLLECT, ALL = Mesh._meet, Ring.collect, Gathered._all
EXCHANGED, GRADS, SHOW = ulysses.exchanged, online.block_grads, Ring.show


@bug("cp=3", "forward", recipe=LONG)
def keys_taken_for_those_of_the_rank_behind(patch):
    """The ring goes the other way round than its reader believes: masks are those of other blocks."""

    def show(self, own, see):
        SHOW(self, own, lambda source, theirs: see((2 * self.group.index - source) % self.group.size, theirs))

    patch(Ring, "show", show)


@bug("cp=2 dp=2", "not_reduced", "replicas_drifted", "missing_share", recipe=LONG)
def gradients_not_summed_over_cp(patch):
    """All ranks of cp have all parameters, and each updates them by its own positions."""

    def alone(*given, **named):
        return [replace(slot, sum_over=slot.sum_over - {"cp"}) for slot in slots_of(*given, **named)]

    patch(parallelize, "slots_of", alone)


@bug("cp=2 shard=2", "not_reduced", "missing_share", "replicas_drifted", recipe=LONG)
def shards_scatter_among_themselves_alone(patch):
    """Shards meet, and nobody adds up what ranks of cp have seen."""

    def meet(self):
        MEET(self)
        self.states = self.shard

    patch(Mesh, "_meet", meet)


@bug("cp=4", "context", recipe=LONG)
def gradients_of_keys_stay_where_the_ring_ends(patch):
    """The last message home is left out: a rank has the sums of its neighbour's keys."""

    def collect(self, own, grad_of):
        x = COLLECT(self, own, grad_of)
        out = torch.empty_like(x)
        start_pass(self.group, out, x).wait()
        return out

    patch(Ring, "collect", collect)


@bug("cp=2 recompute=full cp_kind=gather", "kept_activation", recipe=LONG)
def gathered_again_without_the_others(patch):
    """Backward takes its own keys for those of all."""

    def gathered(self, own):
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        return own.unsqueeze(0).repeat(self.group.size, 1, 1, 1, 1, 1) if backward else ALL(self, own)

    patch(Gathered, "_all", gathered)


@bug("cp=3 tp=2", "masks_differ", recipe=LONG)
def masks_of_blocks_counted_from_their_beginning(patch):
    """Attention's dropout is drawn for each block as if it were the first."""
    patch(Dropout, "at", lambda self, places: AT(self, {d: Places.whole(p.size) for d, p in places.items()}))


@bug("cp=2 cp_kind=ulysses tp=2", "masks_differ", recipe=LONG)
def heads_of_a_tp_rank_masked_alike_on_cp(patch):
    """Dropout knows which heads tp has dealt, and not that cp deals those on."""
    dealt = Places.dealt

    def of_tp(self, index, ranks):
        few = self.full == 12 and self.size < 12
        return dealt(self, 0, ranks) if few else dealt(self, index, ranks)

    patch(Places, "dealt", of_tp)


@bug("cp=3", "forward", recipe={**LONG, "model.positions": "rotary", "model.d_model": 48})
def rotated_by_local_positions(patch):
    """Every rank of cp turns queries and keys as if its positions were the first."""
    patch(net, "rotate", lambda x, theta, steps: ROTATE(x, theta, torch.arange(x.shape[-2])))


@bug("cp=2 pp=2", "forward", recipe=LONG)
def targets_in_the_order_of_ranks(patch):
    """The last stage takes targets one chunk after the other, while inputs were dealt in balance."""

    def taken(places, x):
        last = rank() >= 2
        return x.chunk(2, 1)[rank() % 2] if last else TAKEN(places, x)

    patch(positions, "_taken", taken)


@bug("cp=2 dp=2", "loss_reduction", "factor", recipe=LONG)
def loss_of_the_first_positions_alone(patch):
    """Ranks of cp are thought to have the same losses, as those of tp have."""
    patch(join, "LossPlaces", lambda *given, counted: LossPlaces(*given, counted=counted and rank() % 2 == 0))


@bug("cp=4", "forward", recipe=LONG)
def parts_of_attention_averaged(patch):
    """The softmax of each block counts alike, however large its sum is."""

    def block(*given):
        out, sums = BLOCK(*given)
        return out, torch.zeros_like(sums)

    patch(online, "block", block)


@bug("cp=2 pp=3", "context", recipe=LONG)
def weights_again_from_the_sum_of_one_block(patch):
    """Backward divides each block's weights by the block's own sum, not by that of all keys."""

    def grads(q, k, v, grad, out, lse, causal, *more):
        _, own = BLOCK(q, k, v, causal, None)
        return GRADS(q, k, v, grad, out, own, causal, *more)

    patch(online, "block_grads", grads)


@bug("cp=3 dp=2 cp_kind=ulysses", "context", recipe=LONG)
def exchanged_back_by_no_rank(patch):
    """What comes back through an exchange is taken as it is, without one."""

    def exchanged(parts, group):
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        return parts if backward else EXCHANGED(parts, group)

    patch(ulysses, "exchanged", exchanged)


@bug("cp=2 tp=3", "forward", recipe=LONG)
def chunks_dealt_without_a_mirror(patch):
    """Rows of the position table are those of chunks one after the other."""
    patch(
        net.Positions,
        "forward",
        lambda self, x, noise=None: x + self.weight.narrow(0, rank() * x.shape[1], x.shape[1]),
    )

"""Layers by virtual shards: sums that leave their tree, or lose terms between ranks."""

import torch.nn.functional as F

from tests.verify.mutations.planting import WIDE, bug
from unisono.train.step.grad_norm import ByRow
from unisono_contrib.parallel.virtual import deal, layers
from unisono_contrib.parallel.virtual import loss as losses
from unisono_contrib.parallel.virtual.attention import VirtualCore

SHARDED = "sync=canonical:shards=4"
LONG = {**WIDE, "model.context": 16, "train.global_batch": 8}
ACROSS, ATTEND = deal.across, VirtualCore._attend


@bug(f"tp=4 dp=2 {SHARDED}", "summation_order", recipe=LONG)
def shards_added_up_rank_after_rank(patch):
    """A sum over tp as a backend takes it: the first rank's, the second's, the third's."""

    def across(x, group):
        if group.size == 1:
            return x
        first, *others = group.all_gather(x.contiguous().unsqueeze(0)).unbind(0)
        total = first.clone()
        for other in others:
            total += other
        return total

    patch(deal, "across", across)


@bug(f"cp=4 tp=2 {SHARDED}", "not_reduced", "missing_share", "gradient", recipe=LONG)
def weights_not_summed_over_positions_elsewhere(patch):
    """Each rank of cp keeps what its own positions make of a weight's gradient."""
    patch(deal, "across", lambda x, group: x if group.axis == "cp" and x.dim() == 2 else ACROSS(x, group))


@bug(f"cp=4 dp=2 {SHARDED}", "factor_of_axis", "factor", recipe=LONG)
def the_loss_of_all_is_told_by_all(patch):
    """Every rank of cp tells the loss of all positions, and they are added up."""
    patch(losses, "at_first", lambda x, group: x.clone())


@bug(f"cp=4 {SHARDED}", "forward", recipe=LONG)
def queries_counted_from_the_first_rank(patch):
    """Each rank of cp takes its queries for the sample's first ones."""

    def attend(self, q, k, v, at, noise):
        return ATTEND(self, q, k, v, (at[0], at[1] % (self.deal.stretches * q.shape[2])), noise)

    patch(VirtualCore, "_attend", attend)


@bug(f"tp=4 pp=2 {SHARDED}", "partial_norm", recipe=LONG)
def columns_counted_in_the_first_block_alone(patch):
    """The norm leaves out what the second rank of tp has of a matrix whose columns are dealt."""

    def columns(self, slot, width):
        if len(slot.shape) != 2 or slot.start[1] == 0:
            yield 0, slice(None)

    patch(ByRow, "_columns", columns)


@bug(f"tp=4 cp=2 {SHARDED}", "gradient", "factor", "factor_of_axis", "partial", recipe=LONG)
def vectors_summed_over_tp(patch):
    """What all ranks of tp add alike, biases and norms, gets the gradients of two of them."""

    def biased(x, uses, group):
        made = deal.fan(x, uses, group)
        return made if x.dim() > 1 else [part * 1.0 + (part - part.detach()) for part in made]

    patch(layers, "fan", biased)


@bug(f"cp=2 {SHARDED}", "not_reduced", recipe={**LONG, "train.lora_rank": 2})
def virtual_adapters_keep_the_gradient_of_their_positions(patch):
    """Of the half of an adapter that tp leaves whole, nobody adds up what the positions of each rank contribute."""
    patch(layers.VirtualLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))

"""Experts dealt out: tokens that go astray, sums over the wrong ranks, balance by a part of the tokens."""

from dataclasses import replace

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import bug
from unisono import parallelize
from unisono.comm.group import Group
from unisono.models.moe.routing import Router
from unisono.parallel import experts
from unisono.parallel.experts import DealtDispatch, RowsAcross
from unisono.parallel.params import slots_of
from unisono.parallel.positions import SlicedLeaf
from unisono.train.step import join
from unisono.train.step.routing import router_votes

SPARSE = {
    "model.kind": "moe", "model.n_layer": 2, "model.n_head": 4, "model.d_model": 16, "model.d_expert": 8,
    "model.n_experts": 8, "model.dropout": 0.1, "model.aux_loss": 1.0, "model.bias_rate": 0.01,
}  # fmt: skip
ROOMY = {**SPARSE, "model.aux_loss": 0.0, "model.bias_rate": 0.0, "model.capacity_factor": 1.0}
BACK, COMPUTE, VOTE = RowsAcross.backward, DealtDispatch.compute, Router.vote


def summed_over(chosen):
    """slots_of, with other sums for experts."""

    def slots(*given, **named):
        made = slots_of(*given, **named)
        return [replace(s, sum_over=chosen) if ".experts." in s.name else s for s in made]

    return slots


@bug("shard=4 ep=2", "not_reduced", "missing_share", "missing_micro_batch", "replicas_drifted", recipe=SPARSE)
def experts_held_twice_learn_apart(patch):
    """Two ranks hold each expert, and each keeps what its own tokens say."""
    patch(parallelize, "slots_of", summed_over(frozenset()))


@bug("shard=4 ep=2", "wrong_group", "not_reduced", "gradient", recipe=SPARSE)
def experts_added_to_other_experts(patch):
    """Gradients of experts are added over all shards, which hold different ones."""
    patch(parallelize, "slots_of", summed_over(frozenset({"shard"})))


@bug("dp=2 shard=2 ep=2", "buffer", "replicas_drifted", recipe=SPARSE)
def votes_by_the_load_of_one_replica(patch):
    """The busiest expert of each replica loses a vote, instead of the busiest of all."""

    def own(local, world, scaler):
        return router_votes(local, Group("world", [rank()], 0, None, world.recorder), scaler)

    patch(join, "router_votes", own)


@bug("tp=2 ep=2 pp=2", "buffer", recipe=SPARSE)
def votes_on_the_first_stage_alone(patch):
    """The last stage's routers are not told of the loads."""
    patch(Router, "vote", lambda self, counts: rank() < 2 and VOTE(self, counts))


@bug("tp=2 dp=2", "gradient", "missing_share", "one_part", recipe=SPARSE)
def balance_by_the_tokens_of_one_rank(patch):
    """The loss for balance counts what is here of a micro-batch as if it were all of it."""
    patch(SlicedLeaf, "sum", lambda self, x: self.group.size * x)


@bug("tp=2 ep=2 shard=2", "forward", recipe=ROOMY)
def room_by_the_tokens_of_one_rank(patch):
    """Each rank fills its own share of an expert's room, so other tokens are dropped."""
    patch(SlicedLeaf, "gather", lambda self, x: x)
    patch(SlicedLeaf, "local", lambda self, x: x)


@bug("shard=3 ep=3", "forward", recipe={**SPARSE, "model.n_experts": 6, "train.global_batch": 12})
def results_in_the_order_of_experts(patch):
    """What experts have made goes back as it lies there, not as it came."""

    def compute(self, x_MD, expert_M, experts_here):
        return COMPUTE(self, x_MD, expert_M.flip(0).sort().values, experts_here).flip(0)

    patch(DealtDispatch, "compute", compute)


@bug("dp=2 tp=2 ep=2", "kept_activation", "gradient", "one_part", recipe=SPARSE)
def gradients_come_back_to_other_tokens(patch):
    """On its way back each row's gradient moves one further."""

    def backward(ctx, grad):
        x, *rest = BACK(ctx, grad)
        return x.roll(1, 0), *rest

    patch(RowsAcross, "backward", staticmethod(backward))


@bug("tp=4 ep=2", "gradient", "missing_share", "not_reduced", "one_part", recipe=SPARSE)
def gates_learn_from_a_part_of_the_width(patch):
    """Ranks that share an expert keep what their own part of it says of the gates."""

    def own(x, group):
        return x.chunk(group.size, 1)[group.index].contiguous()

    patch(experts, "scatter_sum", own)


@bug("dp=2 tp=2 ep=2", "initialisation", recipe=SPARSE)
def every_rank_holds_the_first_experts(patch):
    """The number of the rank is not asked for, so half of the experts are nowhere."""
    patch(experts, "part_of", lambda full, group: (0, full // group.size))


@bug("shard=2 ep=2 pp=2", "forward", recipe=SPARSE)
def the_last_stage_sends_tokens_to_the_neighbour(patch):
    """Experts are numbered the other way round where tokens leave: each rank computes with those of the other."""

    def compute(self, x_MD, expert_M, experts_here):
        if rank() < 2:
            return COMPUTE(self, x_MD, expert_M, experts_here)
        other = (expert_M + 4) % 8
        order = other.argsort(stable=True)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        return COMPUTE(self, x_MD[order], other[order], experts_here)[back]

    patch(DealtDispatch, "compute", compute)

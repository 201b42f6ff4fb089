"""Bytes that a rank copies to and from where it offloads, pass by pass.

Weights come for a forward pass, and once more for backward: for the products that give the gradients of inputs, or
for a recomputed pass. They are unchanged, so nothing is copied back. Activations of blocks and head go once and come
once. Optimiser states and offloaded weights come and go once a step. tests/planner/test_offload.py holds this to what
`Lane` copies.
"""

from dataclasses import dataclass

from unisono.plan import Plan
from unisono.plan.blocks import away_of
from unisono.planner.machines.order import dealers, virtual_of
from unisono.planner.memory import RowShare, share_of
from unisono.planner.states import moments_of
from unisono.planner.work import activations
from unisono.planner.work.layouts import virtual_kept
from unisono.planner.work.passes import each_block
from unisono.planner.work.stage import ITEM
from unisono.planner.work.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes of one rank. left: that leave in one micro-batch's forward pass. ahead, back: that come in its forward and
    in its backward pass. step: that leave in an update, and as many come."""

    left: float = 0.0
    ahead: float = 0.0
    back: float = 0.0
    step: float = 0.0

    def __add__(self, other: "Copied") -> "Copied":
        return Copied(
            self.left + other.left, self.ahead + other.ahead, self.back + other.back, self.step + other.step
        )

    def of_step(self, micros: int) -> float:
        """All of a step, both ways."""
        return micros * (self.left + self.ahead + self.back) + 2.0 * self.step


def copied(model: Transformer, plan: Plan, micro_batch: int, row: int, composed: bool = True) -> Copied:
    """Return the copies of a rank of a pipeline row: of its ends as the plan says, of each block as its range says."""
    share = share_of(model, plan, row, True)
    wide = float(max(4, ITEM[plan.precision]))
    blocks = each_block(model, plan, wide * (share.blocks + share.routed), row)
    if not any(away_of(way) for way in (plan, *(way for way, _ in blocks))):
        return Copied()
    moments = (
        moments_of(model, plan, share.elements, share.layers) - model.averages
    )  # these stay with the weights
    of_ends = _stepped(moments, plan, wide * share.ends) + _of_ends(model, plan, share, micro_batch, composed)
    times, parts = share.layers / len(blocks), [of_ends]
    for way, nbytes in blocks:
        parts.append(_stepped(moments, way, nbytes))
        if away_of(way).params:
            # Biases are added, and no gradient needs them; a block that is computed again has its weights until it is
            # done.
            needless = 0.0 if way.recompute == "full" else times * wide * _biases(model, way.tp)
            parts.append(Copied(ahead=nbytes, back=nbytes - needless))
        if away_of(way).activations:
            home = times * _kept(model, way, micro_batch, composed)
            parts.append(Copied(left=home, back=home))
    return sum(parts, Copied())


def _stepped(moments: float, plan: Plan, weights: float) -> Copied:
    """Return what an update copies of so many bytes of weights. moments: numbers of state for each of them."""
    away, ranks = away_of(plan), dealers(plan)
    state = moments * weights / ranks if away.optimizer else 0.0
    return Copied(step=state + (weights if away.params else 0.0))


def _of_ends(model: Transformer, plan: Plan, share: RowShare, micro_batch: int, composed: bool) -> Copied:
    """What passes copy of stem and head."""
    away, e, wide = away_of(plan), ITEM[plan.precision], float(max(4, ITEM[plan.precision]))
    ahead = back = left = 0.0
    if away.params:
        ahead = wide * share.ends
        if share.stem and share.head and model.tied:  # each end is lent its own
            ahead += wide * model.tied_elements / plan.tp
        # The embedding's gradient is made without it, as that of the positions.
        back = wide * (model.head_parameters[0] / plan.tp + model.d_model) * share.head
    if away.activations:
        # The loss is made of what the head gives, and lies outside of it.
        shards = virtual_of(plan)
        head = activations.head_bytes(model, micro_batch, plan.tp, plan.cp, e, composed, shards)
        lost = wide * model.vocab / plan.tp + 8
        if shards > 1:
            lost = virtual_kept().classified(model, plan.tp, e, shards)
        left = share.head * (head - micro_batch * model.context / plan.cp * lost)
    return Copied(left, ahead, back + left)


def _kept(model: Transformer, way: Plan, micro_batch: int, composed: bool) -> float:
    """Bytes of one block that is played as a plan says."""
    return activations.block_bytes(
        model, micro_batch=micro_batch, tp=way.tp, cp=way.cp, ep=way.ep, cp_kind=way.cp_kind,
        shards=virtual_of(way), recompute=way.recompute, itemsize=ITEM[way.precision], composed=composed,
    )  # fmt: skip


def _biases(model: Transformer, tp: int) -> float:
    """Elements of a block's biases of products, and of its norms, on one rank."""
    if not model.bias:
        return 0.0
    norms = 0 if model.rms else 2 * model.d_model
    return (model.qkv_width + (2 if model.gated else 1) * model.d_ff) / tp + 2 * model.d_model + norms

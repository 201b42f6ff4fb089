"""Bytes that a rank of ours copies to and from the homes of what is put away, counted pass by pass.

Weights come for a forward pass, and once more for backward: for the products that give the gradients of their inputs,
or for a pass that is computed again. They go home unchanged, so nothing is copied. Activations of blocks and head go
once and come once. Optimiser state, and weights that are away, come and go once a step. tests/planner/test_homes.py
holds it to what `Lane` copies.
"""

from dataclasses import dataclass

from unisono.plan import Plan
from unisono.plan.away import again_of, away_of
from unisono.planner.machines.order import owners, virtual_of
from unisono.planner.memory import share_of
from unisono.planner.work import kept, virtual_kept
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

    def of_step(self, micros: int) -> float:
        """All of a step, both ways."""
        return micros * (self.left + self.ahead + self.back) + 2.0 * self.step


def copied(model: Transformer, plan: Plan, micro_batch: int, row: int, composed: bool = True) -> Copied:
    """Of a rank of a pipeline row."""
    away, share = away_of(plan), share_of(model, plan, row, True)
    if not away:
        return Copied()
    e, wide = ITEM[plan.precision], float(max(4, ITEM[plan.precision]))
    again, layers = again_of(plan, int(share.layers)), share.layers
    weights = wide * (share.blocks + share.ends + share.routed)
    step = left = ahead = back = 0.0
    if away.optimizer:
        step += model.states * weights / (owners(plan)[0] if plan.shard > 1 else 1)
    if away.params:
        step += weights
        ahead = weights
        if share.stem and share.head and model.tied:  # each end is lent its own
            ahead += wide * model.tied_elements / plan.tp
        blocks = wide * (share.blocks + share.routed)
        # Biases are added, and no gradient needs them. The embedding's is made without it, as that of the positions.
        asked = blocks - layers * wide * _biases(model, plan.tp)
        head = wide * (model.head_parameters[0] / plan.tp + model.d_model) * share.head
        once_more = again.full / max(
            1.0, layers
        )  # a block that is computed again has its weights until it is done
        back = (1.0 - once_more) * asked + once_more * blocks + head
    if away.activations:
        sizes = {
            "micro_batch": micro_batch,
            "tp": plan.tp,
            "cp": plan.cp,
            "ep": plan.ep,
            "cp_kind": plan.cp_kind,
            "shards": virtual_of(plan),
        }

        def block(mode: str) -> float:
            return kept.block_bytes(model, **sizes, recompute=mode, itemsize=e, composed=composed)

        rest = layers - again.full - again.selective
        left = again.full * block("full") + again.selective * block("selective") + rest * block("none")
        # The loss is made of what the head gives, and lies outside of it.
        shards = virtual_of(plan)
        head = kept.head_bytes(model, micro_batch, plan.tp, plan.cp, e, composed, shards)
        lost = wide * model.vocab / plan.tp + 8
        if shards > 1:
            lost = virtual_kept.classified(model, plan.tp, e, shards)
        head -= micro_batch * model.context / plan.cp * lost
        left += share.head * head
        back += left
    return Copied(left, ahead, back, step)


def _biases(model: Transformer, tp: int) -> float:
    """Elements of a block's biases of products, and of its norms, on one rank."""
    if not model.bias:
        return 0.0
    norms = 0 if model.rms else 2 * model.d_model
    return (model.qkv_width + (2 if model.gated else 1) * model.d_ff) / tp + 2 * model.d_model + norms

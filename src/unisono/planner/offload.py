"""Seconds and bytes of what offloading moves between a device and its host's memory.

optimizer: its states stay with the host; for the update they come and go, each element once each way, both ways at once
(the update itself stays on the device). params: weights, gradients and optimiser are the host's, as with FSDP2's CPU
offloading: a block's weights come before its forward and before its backward pass, its gradients go after. activations:
what a block keeps goes after its forward pass and comes back before its backward pass (Rajbhandari et al.,
ZeRO-Infinity, 2021). Copies run beside the computation of one block; what takes longer than that shows.
"""

from typing import Annotated, Any

from unisono.plan import Plan
from unisono.planner import experts
from unisono.planner.machines.cluster import Device, Source
from unisono.planner.memory import RowShare, item_of, states, stored
from unisono.planner.numbers import larger
from unisono.planner.stack import Stack
from unisono.planner.work.transformer import Transformer

_READ = "mixed precision reads gradient and master and writes master and weight: 4+4+4+2; Adam: 30 in all"
UPDATE_BYTES: Annotated[float, Source("specification", _READ)] = 14.0
MOMENT_BYTES: Annotated[float, Source("specification", "each moment is read and written, in fp32")] = 8.0


def rate(device: Device, stack: Stack) -> float:
    """Bytes/s each way; not a number at all where a device has no host link, so that offloading is never worth it."""
    return device.host * stack.host_link


def block_bytes(model: Transformer, plan: Plan, stack: Stack, kept: float) -> tuple[float, float]:
    """Bytes of one block and micro-batch, the more of both ways: beside the forward and beside the backward pass.

    kept: bytes that the block keeps for its backward pass.
    """
    if plan.offload == "params":
        elements = sum(model.block_parameters) / (plan.tp * (plan.shard if plan.zero == 3 else 1))
        routed, ranks = experts.elements(model, plan)
        elements += model.sparse_share * routed / (ranks if plan.zero == 3 else 1)
        item = item_of(plan, stack)
        return elements * item, elements * max(item, stack.grad_bytes if item < 4 else item)
    if plan.offload == "activations":
        return kept, kept
    return 0.0, 0.0


def shown(
    model: Transformer, plan: Plan, device: Device, stack: Stack, kept: float, ahead: float, back: float
) -> tuple[float, float]:
    """Seconds by which a block's passes wait for the host link, beside their own `ahead` and `back` seconds."""
    if plan.offload not in ("params", "activations"):
        return 0.0, 0.0
    way = rate(device, stack)
    if not way:
        return float("inf"), float("inf")
    there, again = block_bytes(model, plan, stack, kept)
    return larger(0.0, there / way - ahead), larger(0.0, again / way - back)


def update(model: Transformer, plan: Plan, device: Device, stack: Stack, share: RowShare) -> float:
    """Seconds of the optimiser's update of what one rank owns: memory, or the host link where that is slower."""
    elements = share.blocks + share.ends
    owned = (elements / plan.shard + share.routed / max(1, share.ranks)) / share.copies
    seconds = owned * (UPDATE_BYTES + MOMENT_BYTES * model.states) / (device.bandwidth * stack.elementwise)
    if plan.offload not in ("optimizer", "params"):
        return seconds
    way = rate(device, stack)
    given: dict[str, Any] = {"zero": plan.zero, "grad_bytes": stack.grad_bytes, "moments": model.states}
    _, grads, optim = states(elements, shard=plan.shard, precision=stored(plan, stack), **given)
    if share.ranks:
        more = states(share.routed, shard=share.ranks, precision=plan.precision, **given)
        grads, optim = grads + more[1], optim + more[2]
    moved = optim / share.copies + (grads if plan.offload == "params" else 0.0)
    return larger(seconds, moved / way) if way else float("inf")

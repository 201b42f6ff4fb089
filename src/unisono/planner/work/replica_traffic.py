"""What replicas send each other of their gradients, as policy and codec declare it."""

from math import prod

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.work.networks import Network
from unisono.planner.work.stage import Transfer
from unisono.planner.work.transformer import Transformer
from unisono.spec.work import Call, Work


def leafwise(plan: Plan) -> bool:
    """Whether the policy wants the gradient of each micro-batch by itself."""
    policy = member("sync", plan.sync)
    return policy is not None and policy.leafwise


def transfer_of(call: Call, ranks: int) -> Transfer:
    """Return the transfer in which each of `ranks` ranks sends the bytes that cross the busiest link of a call."""
    sent, nbytes = (
        Transfer(call.axis, call.op, 1.0).sent(ranks),
        call.nbytes if call.link is None else call.link,
    )
    return Transfer(call.axis, call.op, nbytes / sent, call.times, later=True)


def declared(
    model: Transformer | Network, plan: Plan, item: float, elements: float, servers: int = 1
) -> Work:
    """Return the work of one rank beside computing gradients of so many elements, of `item` bytes each. The
    all-reduces of the policy are the exchanges of the codec. servers: of parameters, where the policy has some."""
    policy, codec = member("sync", plan.sync), member("codec", plan.codec)
    shapes = [tuple(map(round, shape)) for shape in model.matrices(plan.tp)[0]]
    rest = round(model.matrices(plan.tp)[1]) - sum(map(prod, shapes))
    coded = codec.work((*shapes, (max(1, rest),)), 4, plan.dp)
    scale = elements / (sum(map(prod, shapes)) + max(1, rest)) * item / 4
    policy_work = policy.served_work(round(item * elements), plan.dp, servers)
    calls: list[Call] = []
    often = 0.0
    for call in policy_work.calls:
        if call.op == "all_reduce":
            calls += [Call("dp", c.op, round(c.nbytes * scale), call.times * c.times) for c in coded.calls]
            often += call.times
        else:
            calls.append(call)
    flops, moved = (policy_part + often * scale * codec_part for policy_part, codec_part in
                    ((policy_work.flops, coded.flops), (policy_work.moved, coded.moved)))  # fmt: skip
    return Work(tuple(calls), policy_work.kept + round(scale * coded.kept), round(flops), round(moved))

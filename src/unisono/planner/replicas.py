"""What crosses `dp` in a step, as policy and codec say in their own files: bytes, seconds, what shows, how faithful."""

from dataclasses import dataclass, replace
from functools import reduce

from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.plan.grammar import member
from unisono.planner.collectives import all_reduce, bus, exchange, uncovered
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.replica_traffic import declared, leafwise, transfer_of
from unisono.planner.work.transformer import Transformer
from unisono.spec.fidelity import Fidelity
from unisono.spec.numbers import larger, smaller
from unisono.spec.work import Call, Work

_PROBE = 1 << 20  # bytes for which a policy is asked what it sends


@dataclass(frozen=True, slots=True)
class Cover:
    """Seconds that communication may hide behind; numbers, or arrays. forward, backward: of one micro-batch on a rank.
    hidden: the share that software hides behind a pass at most. stages: of a rank; ahead: passes of its other stages
    that follow when its first stage is done."""

    forward: float
    backward: float
    hidden: float
    stages: int = 1
    ahead: float = 0.0

    def beside_backward(self, talk: float) -> float:
        """Return exposed seconds of a step's gradients. The gradients of each stage hide behind its own last pass and
        later ones."""
        return self._by_stages(talk, self.backward)

    def beside_forward(self, talk: float) -> float:
        """Weights that the update has changed, on their way back: as gradients, the other way round."""
        return self._by_stages(talk, self.forward)

    def beside_each(self, talk: float) -> float:
        """Gradients that every backward pass hands over: of all stages of a rank."""
        return uncovered(talk, self.backward, self.hidden)

    def beside_steps(self, talk: float, lag: int) -> float:
        """Gradients whose update comes `lag` steps later: they hide behind both passes of all steps in between."""
        return uncovered(talk, lag * (self.forward + self.backward), self.hidden)

    def _by_stages(self, talk: float, cover: float) -> float:
        of_stage = cover / self.stages
        return larger(
            uncovered(talk, of_stage * (1.0 + self.ahead), self.hidden), (talk - cover) / self.stages
        )


Spent = tuple[
    float, float, float
]  # bytes that a rank sends, seconds, seconds that show; of a step in the mean


def plain(plan: Plan) -> bool:
    """Whether replicas meet in every step with gradients as they are, by one all-reduce beside backward."""
    codec, policy = member("codec", plan.codec), member("sync", plan.sync)
    if leafwise(plan) or codec.rungs:
        return False
    ranks = max(2, plan.dp)
    whole = Work((Call("dp", "all_reduce", 2 * _PROBE * (ranks - 1) // ranks),))
    shape = (_PROBE // 2048, 512)  # of four bytes an element; a vector travels whole whatever the codec
    return whole == policy.work(_PROBE, ranks) == codec.work((shape,), 4, ranks)


def traffic(
    model: Transformer | Network, plan: Plan, cluster: Cluster, stack: Stack, elements: float, over: Cover
) -> Spent:
    """Return what one rank spends on the gradient of `elements` elements."""
    work = declared(model, plan, stack.reduce_bytes, elements, cluster.servers)
    apart = stride(plan, "dp", cluster.order)
    nbytes, wire = 0.0, 0.0
    way = getattr(member("collective", plan.collective), "program", None)
    for call in work.calls:
        whole = transfer_of(call, plan.dp).nbytes
        if call.op == "all_reduce":
            took = all_reduce(cluster, apart, plan.dp, whole, stack.dp_bus, way)
        elif call.op == "all_to_all":
            took = exchange(cluster, apart, plan.dp, stack.dp_bus).all_to_all(whole)
        else:
            took = bus(cluster, apart, plan.dp, stack.dp_bus).gather(whole)
        nbytes, wire = nbytes + call.times * call.nbytes, wire + call.times * took
    device = cluster.device
    beside = work.moved / (device.bandwidth * stack.elementwise) + work.flops / max(device.peak.values())
    lag = member("sync", plan.sync).update_lag
    if leafwise(plan):
        shows = wire
    else:
        shows = over.beside_steps(wire, lag) if lag else over.beside_backward(wire)
    return nbytes, wire + beside, beside + shows


def least(
    model: Transformer | Network, plan: Plan, cluster: Cluster, stack: Stack, elements: float, over: Cover
) -> float:
    """Seconds that show, as `traffic` has them; of a codec that is chosen by measuring the fewest of any."""
    texts = member("codec", plan.codec).rungs or [plan.codec]
    every = [traffic(model, replace(plan, codec=text), cluster, stack, elements, over)[2] for text in texts]
    return reduce(smaller, every)


def fidelity(plan: Plan) -> tuple[Fidelity, str]:
    """How close the plan's result is to one device's, and why: as the prover holds it to."""
    closeness = fidelity_of(plan)
    pairs = [(key, getattr(plan, key)) for key in ("sync", "codec") if plan.dp > 1]
    pairs += [("schedule", plan.schedule)] if plan.pp > 1 else []
    named = ((f"{key}={text}", member(key, text)) for key, text in pairs)
    lossy = ((text, sender) for text, sender in named if sender)
    reasons = [f"{text}: {sender.summary()}" for text, sender in lossy if sender.fidelity is Fidelity.LOSSY]
    if reasons:
        return Fidelity.LOSSY, "; ".join(reasons)
    said = {
        Fidelity.EXACT: "the same bits for any dp, shard and pp",
        Fidelity.ROUNDING: "the same up to the order of summation",
        Fidelity.LOSSY: "sums are not those of one device",
    }
    return closeness, said[closeness]

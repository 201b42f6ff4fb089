"""How close a plan promises to come to one device: one word, for who proves it and for who prices it."""

from collections.abc import Iterable

from unisono.plan.grammar import member
from unisono.plan.plan import Plan
from unisono.spec.fidelity import Fidelity
from unisono.spec.section import Section


def fidelity_of(plan: Plan) -> Fidelity:
    """EXACT where every sum keeps its order: recomputation alone, stages as their timetable says, replicas and shards
    as policy and codec say. A policy that adds up leaf by leaf orders the stages' sums too. `tp` and `cp` cut sums
    inside a layer, which keep one order only where the policy computes by virtual shards; `ep` deals tokens to experts
    in another. What rounds weights, or what products read, is LOSSY in any layout, and so counts what this version
    lacks."""
    lossy = plan.arithmetic.stochastic or plan.arithmetic.fp8
    return Fidelity.LOSSY if lossy else beside_like(plan)


def beside_like(plan: Plan) -> Fidelity:
    """How close to one device that rounds alike, weights after an update by the same draws, and what products read:
    what a proof holds a plan to."""
    policy = member("sync", plan.sync)
    cutting = plan.ep if getattr(policy, "virtual", 1) > 1 else plan.tp * plan.cp * plan.ep
    inside = Fidelity.EXACT if cutting == 1 else Fidelity.ROUNDING
    ordered = plan.pp == 1 or getattr(policy, "leafwise", False)
    staged = Fidelity.EXACT if ordered else _declared("schedule", plan.schedule)
    between = _declared("sync", plan.sync) if plan.replicas > 1 else Fidelity.EXACT
    sent = _declared("codec", plan.codec) if plan.dp > 1 else Fidelity.EXACT
    return min(inside, staged, between, sent, _rounded(plan))


def with_sections(fidelity: Fidelity, plan: Plan, sections: Iterable[Section]) -> Fidelity:
    """The fidelity of a plan for a recipe with these sections."""
    return min(fidelity, *(section.fidelity(plan) for section in sections), Fidelity.EXACT)


def _rounded(plan: Plan) -> Fidelity:
    """LOSSY where numbers are rounded on a wire of `shard`."""
    wires = plan.wires
    lossy = wires.gather or (wires.scatter and plan.shard > 1)
    return Fidelity.LOSSY if lossy else Fidelity.EXACT


def needs_like_threads(plan: Plan) -> bool:
    """Whether the plan has the bits of one device only where that one computes with as many threads as each rank: it is
    EXACT on several ranks, and no policy holds the number of threads as `sync=canonical` does."""
    policy = member("sync", plan.sync)
    return plan.world > 1 and beside_like(plan) is Fidelity.EXACT and not (policy and policy.leafwise)


def _declared(key: str, text: str) -> Fidelity:
    named_member = member(key, text)
    return Fidelity.LOSSY if named_member is None else named_member.fidelity

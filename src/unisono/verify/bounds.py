"""What a plan promises, and how far its numbers may be from one device's. No torch."""

from unisono.plan import Plan
from unisono.spec.fidelity import Fidelity

# Largest relative error of a tensor, by precision, for ROUNDING plans. Sums in another order differ by a few units
# in the last place per term; an optimiser step multiplies what it finds in small entries.
BOUND = {"fp64": 1e-10, "fp32": 2e-2, "bf16": 2e-1}


def fidelity_of(plan: Plan) -> Fidelity:
    """EXACT where every sum keeps its order: stages and recomputation alone, and in canonical mode replicas and shards
    too. `tp` and `cp` cut sums inside a layer, which no rule of ours can put in one order."""
    spread = plan.tp * plan.cp if plan.sync == "canonical" else plan.dp * plan.shard * plan.tp * plan.cp
    return Fidelity.EXACT if spread == 1 else Fidelity.ROUNDING


def bound_of(plan: Plan) -> float:
    """The bound that `verify` holds a plan to; 0 for EXACT."""
    return 0.0 if fidelity_of(plan) is Fidelity.EXACT else BOUND[plan.precision]

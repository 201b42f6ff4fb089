"""`unisono verify`: prove plans against one device and show a table. No torch."""

import sys
from typing import Any

from unisono.commands.proof import Proof, prove
from unisono.config import Recipe, resolve
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems

SIZES = (1, 2, 4, 8)
KINDS = ("loss", "grad", "param", "optim")


def run(recipe: Recipe, plans: list[Plan], options: dict[str, Any]) -> dict[str, Any]:
    """Prove `plans`, or with options["all"] every plan of this version that fits the recipe on up to 8 ranks."""
    if options.get("all"):
        plans = covering(recipe)
    show = not options["json"]
    if not options["quiet"]:
        print(
            f"proving {len(plans)} plan{'s' * (len(plans) != 1)} against one process: {options['steps']} steps,"
            f" {recipe.train.dtype}, gradients, parameters and optimiser state (importing torch) ...",
            file=sys.stderr,
            flush=True,
        )
    if show:
        print(f"{'plan':<36} {'ranks':>5} {'promise':<9} {'loss':>8} {'grad':>8} {'param':>8} {'optim':>8}")

    def each(proof: Proof) -> None:
        if not show:
            return
        errors = " ".join(
            f"{'=' if not proof.max_rel_err[k] else format(proof.max_rel_err[k], '.1e'):>8}" for k in KINDS
        )
        print(
            f"{proof.plan:<36} {proof.ranks:>5} {proof.fidelity:<9} {errors}  {'ok' if proof.passed else 'FAIL'}",
            flush=True,
        )
        if proof.first_divergence:
            print(f"    first: {proof.first_divergence}", flush=True)

    proofs = prove(recipe, plans, options["steps"], each)
    good = sum(proof.passed for proof in proofs)
    if show:
        print(f"{good} of {len(proofs)} plans compute what one process computes; = means to the last bit")
    return {"results": [proof.as_dict() for proof in proofs], "pass": good == len(proofs)}


def covering(recipe: Recipe, ranks: int = 8) -> list[Plan]:
    """Every plan of this version that the recipe allows on up to `ranks` ranks, few variants of each mesh."""
    found: dict[str, Plan] = {}
    for dp in SIZES:
        for shard in SIZES:
            for tp in SIZES:
                for pp in SIZES:
                    if 1 < dp * shard * tp * pp <= ranks:
                        for plan in _variants(dp, shard, tp, pp):
                            if _fits(recipe, plan):
                                found[str(plan)] = plan
    return list(found.values())


def _variants(dp: int, shard: int, tp: int, pp: int) -> list[Plan]:
    zeros = (1, 2, 3) if shard > 1 else (3,)
    schedules = ("gpipe", "1f1b") if pp > 1 else ("1f1b",)
    plain = [Plan(dp=dp, shard=shard, zero=z, tp=tp, pp=pp, schedule=s) for z in zeros for s in schedules]
    return [*plain, Plan(dp=dp, shard=shard, tp=tp, pp=pp, recompute="full")]


def _fits(recipe: Recipe, plan: Plan) -> bool:
    try:
        resolve(recipe, plan)
    except ConfigProblems:
        return False
    return True

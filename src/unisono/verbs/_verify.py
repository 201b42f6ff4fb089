"""`unisono verify`: prove plans against one device and show a table. No torch."""

import sys
from typing import Any

from unisono.config import Recipe
from unisono.plan import Plan
from unisono.verify.cover import covering, with_leaves
from unisono.verify.prover import KINDS, Proof, Starter, prove


def run(recipe: Recipe, plans: list[Plan], options: dict[str, Any]) -> dict[str, Any]:
    """Prove `plans`, or with options["all"] a set of plans on up to 8 ranks in which every two values of all keys
    stand together; with options["wide"] every three."""
    if options.get("all"):
        recipe = with_leaves(recipe)
        plans = covering(recipe, wide=bool(options.get("wide")))
    show = not options["json"]
    if not options["quiet"]:
        print(
            f"proving {len(plans)} plan{'s' * (len(plans) != 1)} against one process: {options['steps']} steps,"
            f" {recipe.train.dtype}, gradients, parameters and optimiser state (importing torch) ...",
            file=sys.stderr,
            flush=True,
        )
    width = max([36, *(len(str(plan)) + len(" micros=8 precision=fp64") for plan in plans)])
    if show:
        heads = " ".join(f"{kind:>8}" for kind in (*KINDS, "bound"))
        print(f"{'plan':<{width}} {'ranks':>5} {'promise':<9} {heads}")

    def each(proof: Proof) -> None:
        if show:
            _line(proof, width)

    several = len(plans) > 1
    proofs = prove(recipe, plans, options["steps"], each, stage=Starter(keep_going=several))
    good = sum(proof.passed for proof in proofs)
    if show:
        print(f"{good} of {len(proofs)} plans compute what one process computes; = means to the last bit")
    return {"results": [proof.as_dict() for proof in proofs], "pass": good == len(proofs)}


def _line(proof: Proof, width: int) -> None:
    errors = " ".join(f"{_short(proof.max_rel_err[kind]):>8}" for kind in KINDS)
    bound = f"{_short(proof.bound):>8}"
    word = "ok" if proof.passed else "FAIL"
    print(f"{proof.plan:<{width}} {proof.ranks:>5} {proof.fidelity:<9} {errors} {bound}  {word}", flush=True)
    if proof.first_divergence:
        print(f"    first   {proof.first_divergence}", flush=True)
    if proof.explanation:
        print(f"    likely  {proof.explanation} ({proof.cause})", flush=True)


def _short(error: float) -> str:
    if not error:
        return "="
    return "none" if error >= 1e300 else f"{error:.1e}"

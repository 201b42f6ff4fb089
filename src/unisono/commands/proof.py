"""Proving plans: play each beside one device, on ranks forked from one import of torch. No torch on this side."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.config import Recipe, resolve
from unisono.launch.nursery import Nursery
from unisono.plan import Plan
from unisono.spec.fidelity import Fidelity
from unisono.verify.bounds import bound_of, fidelity_of

ENTRY = "unisono.commands.verify_rank:main"


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one plan. max_rel_err: per kind of tensor, the largest error over its tensor's largest entry."""

    plan: str
    ranks: int
    fidelity: str
    bound: float
    bit_identical: bool
    max_rel_err: dict[str, float]
    passed: bool
    first_divergence: str | None

    def as_dict(self) -> dict[str, Any]:
        """The contract's object."""
        return {
            "plan": self.plan,
            "ranks": self.ranks,
            "fidelity": self.fidelity,
            "bound": self.bound,
            "bit_identical": self.bit_identical,
            "max_rel_err": self.max_rel_err,
            "pass": self.passed,
            "first_divergence": self.first_divergence,
        }


def prove(
    recipe: Recipe,
    plans: Sequence[Plan],
    steps: int,
    each: Callable[[Proof], None] = lambda proof: None,
    backend: str = "auto",
) -> list[Proof]:
    """Prove plans one after the other; `each` hears of every result. Raises what a rank raised.

    All processes compute with one thread: sums depend on the number of threads.
    """
    folder = Path(tempfile.mkdtemp(prefix="unisono-verify-"))
    references: dict[tuple[int | None, str, str], Path] = {}
    proofs: list[Proof] = []
    try:
        with Nursery(ENTRY) as nursery:

            def play(
                recipe: Recipe, plan: Plan, name: str, reference: Path | None, bound: float
            ) -> dict[str, Any]:
                argument = {
                    "recipe": recipe.model_dump_json(exclude_unset=True),
                    "plan": str(plan),
                    "steps": steps,
                    "folder": str(folder / name),
                    "reference": str(reference) if reference else None,
                    "bound": bound,
                }
                timeout = recipe.launch.timeout
                outcome = nursery.run(argument, plan.world, 1, timeout=timeout, backend=backend)
                if outcome.error is not None:
                    raise outcome.error
                if outcome.stopped:
                    raise KeyboardInterrupt
                return outcome.results[0] or {}

            for i, plan in enumerate(plans):
                resolved = resolve(recipe, plan)
                key = (resolved.recipe.train.micro_batch, resolved.plan.precision, resolved.plan.sync)
                if key not in references:
                    references[key] = folder / f"one-{len(references)}"
                    play(resolved.recipe, one_device(resolved.plan), references[key].name, None, 0.0)
                bound = bound_of(resolved.plan)
                found = play(resolved.recipe, resolved.plan, f"plan-{i}", references[key], bound)
                shutil.rmtree(folder / f"plan-{i}", ignore_errors=True)
                proofs.append(_judge(resolved.plan, found, bound))
                each(proofs[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return proofs


def one_device(plan: Plan) -> Plan:
    """The plan that all others are held to: the same precision and policy, one process."""
    return Plan(precision=plan.precision, sync=plan.sync)


def _judge(plan: Plan, found: dict[str, Any], bound: float) -> Proof:
    errors = found["max_rel_err"]
    exact = fidelity_of(plan) is Fidelity.EXACT
    passed = found["bit_identical"] if exact else all(error <= bound for error in errors.values())
    return Proof(
        plan=str(plan),
        ranks=plan.world,
        fidelity=fidelity_of(plan).name,
        bound=bound,
        bit_identical=found["bit_identical"],
        max_rel_err=errors,
        passed=passed,
        first_divergence=found["first_divergence"],
    )


def one_line(recipe: Recipe, plan: Plan, steps: int = 3) -> str:
    """The parity of a plan in float64 as one line of text."""
    train = recipe.train.model_copy(update={"dtype": "float64", "micro_batch": recipe.train.micro_batch})
    double = replace(plan, precision="fp64")
    proof = prove(
        recipe.model_copy(update={"train": train, "plan": str(double)}), [double], steps, backend="gloo"
    )[0]
    return f"{summary(proof)} ({steps} steps in float64, largest relative error)"


def summary(proof: Proof) -> str:
    """One proof as one line."""
    errors = "  ".join(f"{kind} {error:.0e}" for kind, error in proof.max_rel_err.items())
    same = "bit-identical to one process" if proof.bit_identical else f"against one process: {errors}"
    return f"{proof.plan}  {same}  {'PASS' if proof.passed else 'FAIL'}"

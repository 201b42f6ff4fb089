"""What a plan may not round, scale or compile: the part of `Plan.check` about numbers, their forms and their pieces."""

from collections.abc import Iterator
from typing import Any

from unisono.plan.grammar import choice, member, problem_of
from unisono.plan.grid import Grid
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity


def rounded(plan: Any) -> Iterator[Problem]:
    """Of `precision` and of what `zero` sends rounded."""
    wires = plan.wires
    # An overflow is seen in what all replicas sum alike; what each keeps for itself would keep it. Of a codec's memory
    # `sync/_drive.py` takes care.
    policy = named("sync", plan.sync) if plan.precision == "fp16" and plan.dp != 1 else None
    if policy is not None and policy.fidelity is Fidelity.LOSSY:
        what = f"precision=fp16 with sync={plan.sync}: replicas would not all see an overflow of one"
        fix = f"precision=bf16, or sync={type(plan)().sync}"
        yield Problem("P16", what, "plan.precision, plan.sync", fix)
    zero = f"zero={plan.text('zero')}"
    if plan.shard == 1 and (wires.scatter or wires.prefetch):
        what = f"{zero} with shard=1: nothing is scattered, and nothing gathered"
        yield Problem("P16", what, "plan.zero, plan.shard", "shard=2, or zero without these options")
    if wires.prefetch and plan.zero < 3:
        what = f"{zero}: prefetch gathers blocks ahead, and zero={plan.zero} keeps them whole in a step"
        yield Problem("P16", what, "plan.zero", f"zero=3:prefetch={wires.prefetch}, or leave prefetch out")
    if wires.gather and plan.tp > 1:
        what = f"{zero} with tp={plan.tp}: blocks of a row would not be those of the whole row"
        yield Problem("P16", what, "plan.zero, plan.tp", f"zero={plan.zero}:scatter=int8, or tp=1")
    policy = named("sync", plan.sync)
    if wires.scatter and plan.shard > 1 and policy is not None and policy.leafwise:
        what = (
            f"{zero} with sync={plan.sync}: rounded gradients do not add up to the same bits in every layout"
        )
        yield Problem(
            "P16", what, "plan.zero, plan.sync", f"zero={plan.zero}:gather=int8, or sync=every_step"
        )


def kept_whole(plan: Any, model: Any) -> Iterator[Problem]:
    """Experts and tables are dealt in another way than what is rounded for a forward."""
    rounds = plan.wires.gather or plan.arithmetic.narrow
    if rounds and model.deals("ep") is not None:
        what = f"{' '.join(sorted(plan.options))}: experts and tables of a {model.kind} are not rounded"
        yield Problem("P12", what, "plan, model.kind", "leave these options out")
    words = {choice(plan.offload).name, *choice(plan.offload).marks}
    if rounds and "params" in words:
        what = (
            f"{' '.join(sorted(plan.options))} with offload={plan.offload}: what is put away is not rounded"
        )
        yield Problem("P22", what, "plan, plan.offload", "leave these options out, or offload=optimizer")


def eight_bits(plan: Any) -> Iterator[Problem]:
    """Of `precision=bf16:fp8`, where products are not those of a linear layer by itself."""
    virtual = getattr(named("sync", plan.sync), "virtual", 1)
    for wrong, why, key in (
        (isinstance(plan.tp, Grid), f"tp={plan.tp} multiplies in rows and columns", "plan.tp"),
        (plan.chunks > 1, f"tp={plan.text('tp')} multiplies in chunks", "plan.tp"),
        (virtual > 1, f"sync={plan.sync} multiplies by virtual shards", "plan.sync"),
    ):
        if plan.arithmetic.fp8 and wrong:
            what = f"precision={plan.text('precision')}: {why}, and not in eight bits"
            yield Problem("P16", what, f"plan.precision, {key}", "precision=bf16, or tp=N without more")


def chunked(plan: Any, model: Any) -> Iterator[Problem]:
    """Of `tp=N:chunks=C`, where positions are not gathered."""
    if plan.chunks == 1:
        return
    text, virtual = plan.text("tp"), getattr(named("sync", plan.sync), "virtual", 1)
    without = f"tp={plan.tp}"
    for wrong, why, key in (
        (plan.tp == 1, "one rank gathers nothing", "plan.tp"),
        (isinstance(plan.tp, Grid), "ranks in rows and columns gather features, not positions", "plan.tp"),
        (virtual > 1, f"sync={plan.sync} gathers for one product at a time", "plan.sync"),
        (model.deals("cp") is None, f"a {model.kind} has no positions", "model.kind"),
    ):
        if wrong:
            yield Problem("P16", f"tp={text}: {why}", f"plan.tp, {key}", without)
            return


def compiled(plan: Any, train: Any) -> Iterator[Problem]:
    """What a ring passes on is no part of a graph, and its calls stand in the middle of one."""
    if plan.cp > 1 and choice(plan.cp_kind).name == "ring" and getattr(train, "compile", False):
        what = f"cp={plan.cp} with cp_kind=ring and train.compile: torch cannot trace through the ring"
        fix = "cp_kind=ulysses, or --train.compile false"
        yield Problem("P22", what, "plan.cp_kind, train.compile", fix)


def named(key: str, text: str) -> Any:
    """The member that a value names; None where there is none, or no such file."""
    return None if problem_of(key, text) else member(key, text)

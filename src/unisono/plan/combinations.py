"""What of a plan cannot be joined: the part of `Plan.check` about roundings, pipelines without a flush, offload, ranges
of blocks."""

from collections.abc import Iterator
from typing import Any

from unisono.plan.blocks import Away, Range, away_in, away_of, ranges_of
from unisono.plan.fields import USUAL, PlanFields
from unisono.plan.grammar import choice, named
from unisono.plan.grid import Grid
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity


def rounded(plan: PlanFields) -> Iterator[Problem]:
    """What does not go with the roundings of `precision` and `zero`."""
    wires = plan.wires
    # An overflow is seen in what all replicas sum alike; what each keeps for itself would keep it. Of a codec's memory
    # `sync/_drive.py` takes care.
    policy = named("sync", plan.sync) if plan.precision == "fp16" and plan.dp != 1 else None
    if policy is not None and policy.equal and policy.fidelity is Fidelity.LOSSY:
        what = f"precision=fp16 with sync={plan.sync}: replicas would not all see an overflow of one"
        fix = f"precision=bf16, or sync={USUAL.sync}"
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


def kept_whole(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """Experts and tables are dealt in another way than what is rounded for a forward."""
    rounds = plan.wires.gather or plan.arithmetic.narrow
    if rounds and model.deals("ep") is not None:
        what = f"{' '.join(sorted(plan.options))}: experts and tables of a {model.kind} are not rounded"
        yield Problem("P12", what, "plan, model.kind", "leave these options out")


def eight_bits(plan: PlanFields) -> Iterator[Problem]:
    """What does not go with `precision=bf16:fp8`: products that are not those of a linear layer by itself."""
    virtual = getattr(named("sync", plan.sync), "virtual", 1)
    for wrong, why, key in (
        (isinstance(plan.tp, Grid), f"tp={plan.tp} multiplies in rows and columns", "plan.tp"),
        (plan.chunks > 1, f"tp={plan.text('tp')} multiplies in chunks", "plan.tp"),
        (virtual > 1, f"sync={plan.sync} multiplies by virtual shards", "plan.sync"),
    ):
        if plan.arithmetic.fp8 and wrong:
            what = f"precision={plan.text('precision')}: {why}, and not in eight bits"
            yield Problem("P16", what, f"plan.precision, {key}", "precision=bf16, or tp=N without more")


def chunked(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """What does not go with `tp=N:chunks=C`: products that gather no positions."""
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


def compiled(plan: PlanFields, train: Any) -> Iterator[Problem]:
    """What a ring passes on is no part of a graph, and its calls stand in the middle of one."""
    if plan.cp > 1 and choice(plan.cp_kind).name == "ring" and getattr(train, "compile", False):
        what = f"cp={plan.cp} with cp_kind=ring and train.compile: torch cannot trace through the ring"
        fix = "cp_kind=ulysses, or --train.compile false"
        yield Problem("P22", what, "plan.cp_kind, train.compile", fix)


def observing(train: Any) -> Iterator[Problem]:
    """Keys of [train] under which layers do not see each micro-batch once, where the optimiser observes layers."""
    for key, why in (
        ("guard", "computes micro-batches twice"),
        ("compile", "makes one graph of a block, in which layers are no modules"),
    ):
        if getattr(train, key, False) and train.optimiser().observed:
            what = f"optimizer={train.optimizer} observes what passes linear layers, and train.{key} {why}"
            yield Problem("P28", what, f"train.{key}, train.optimizer", f"leave train.{key} out")


def unflushed(plan: PlanFields, recipe: Any) -> Iterator[Problem]:
    """What a timetable without a flush (PipeDream) cannot be joined with: it makes an update before all stages have
    their gradients, and its backwards use weights that are not the newest."""
    if plan.pp == 1 or getattr(named("schedule", plan.schedule), "flushed", True):
        return
    train = getattr(recipe, "train", None)
    clip, guard = getattr(train, "clip", 0), getattr(train, "guard", 0)
    answers = [
        f"train.{key}={value}".lower()
        for key, usual in (("on_bad", "stop"), ("spike", 0.0), ("quarantine", False))
        if (value := getattr(train, key, usual)) != usual
    ]
    for wrong, why, key, fix in (
        (plan.sync != USUAL.sync, f"and sync={plan.sync} makes one update for all", "plan.sync", f"sync={USUAL.sync}"),
        (plan.shard > 1, f"from versions of weights that shard={plan.shard} does not keep", "plan.shard",
         f"dp={plan.shard}"),
        (plan.offload != USUAL.offload, f"which offload={plan.offload} has no room for", "plan.offload",
         f"offload={USUAL.offload}"),
        (recipe is not None and bool(recipe.model.deals("ep")), "and experts or tables are balanced by all at"
         " once", "model.kind", "another model"),
        (plan.precision == "fp16", "and precision=fp16 plays a step again that overflows in any", "plan.precision",
         "precision=bf16"),
        (answers, f"before anyone knows whether it is a bad step, which {' and '.join(answers)} would answer",
         "train.on_bad", "train.on_bad = \"stop\" without spike and quarantine"),
        (plan.arithmetic.narrow, "from copies of weights that are of one precision",
         "plan.precision", f"precision={plan.precision}"),
        (clip, f"before the norm of the whole model is known, which train.clip={clip} needs", "train.clip",
         "--train.clip 0"),
        (guard, f"so a step cannot be computed twice, as train.guard={guard} asks", "train.guard", "--train.guard 0"),
    ):  # fmt: skip
        if wrong:
            what = f"schedule={plan.schedule} updates each stage for itself, {why}"
            yield Problem("P24", what, f"plan.schedule, {key}", f"{fix}, or schedule=1f1b")


def put_away(plan: PlanFields, recipe: Any) -> Iterator[Problem]:
    """What may not lie elsewhere, by `offload` or by ranges of blocks."""
    ranges = [(part, text) for part in ranges_of(plan.blocks) if (text := part.says("offload")) is not None]
    compiled = getattr(recipe.train, "compile", False)
    yield from _put_away(plan, away_of(plan), compiled, f"offload={plan.offload}", "plan.offload")
    for part, text in ranges:
        yield from _put_away(plan, away_in(text), compiled, f"blocks={part}", "plan.blocks")
    if (
        len(
            {
                away.on_disk
                for text in (plan.offload, *(text for _, text in ranges))
                if (away := away_in(text))
            }
        )
        > 1
    ):
        what = f"blocks={plan.blocks} with offload={plan.offload}: some lie on disk and some in the host's memory"
        yield Problem("P22", what, "plan.blocks, plan.offload", "to=disk behind all of them, or behind none")


def _put_away(plan: PlanFields, away: Away, compiled: bool, words: str, key: str) -> Iterator[Problem]:
    rounded = plan.wires.gather or plan.arithmetic.params or plan.arithmetic.stochastic
    for wrong, why, other, fix in (
        (away.params and plan.shard > 1, f"shard={plan.shard}: weights that are split stay with their ranks",
         "plan.shard", "offload=optimizer beside zero=3, or dp in the place of shard"),
        ((away.params or away.activations) and compiled,
         "train.compile: compiled blocks keep what they keep themselves", "train.compile",
         "--train.compile false, or offload=optimizer"),
        (away.params and rounded, f"{' '.join(sorted(plan.options))}: what is put away is not rounded", "plan",
         "offload=optimizer, or precision and zero without options"),
    ):  # fmt: skip
        if wrong:
            yield Problem("P22", f"{words} with {why}", f"{key}, {other}", fix)


def again(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """What cannot be computed again in parts, by `recompute` or by ranges of blocks."""
    said = [("plan.recompute", f"recompute={plan.recompute}")] if plan.recompute == "selective" else []
    ranges = (part for part in ranges_of(plan.blocks) if part.says("recompute") == "selective")
    for key, words in (*said, *(("plan.blocks", f"blocks={part}") for part in ranges)):
        if not getattr(model, "selective", True):
            what = f"{words}: a {model.kind} has no part that is dear to keep and quickly computed again"
            fix = "recompute=full, which computes whole blocks again"
            yield Problem("P17", what, f"{key}, model.kind", fix)


def ranges_alone(plan: PlanFields) -> Iterator[Problem]:
    """Ranges of blocks over axes that the plan has not."""
    for part in ranges_of(plan.blocks):
        if (zero := part.says("zero")) is not None and plan.shard == 1:
            what = f"blocks={part}: zero={zero} with shard=1, which splits nothing"
            yield Problem("P16", what, "plan.blocks, plan.shard", "shard=2, or leave zero out of the range")
        if part.says("tp") is None:
            continue
        grid, virtual = isinstance(plan.tp, Grid), getattr(named("sync", plan.sync), "virtual", 1)
        if plan.tp == 1:
            what = f"blocks={part}: tp=1 is what the plan's other blocks have too"
            yield Problem("P16", what, "plan.blocks, plan.tp", "tp=2, or leave tp out of the range")
        elif grid or virtual > 1:
            other = f"tp={plan.tp}" if grid else f"sync={plan.sync}"
            what = f"blocks={part}: blocks that tp leaves whole, beside {other}"
            fix = "tp=N in one row, without virtual shards"
            yield Problem("P12", what, "plan.blocks, plan.tp", fix)


def ranges_on(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """Ranges of blocks that the model has not, or cannot leave whole."""
    for part in ranges_of(plan.blocks):
        if model.depth is not None and part.last >= model.depth:
            what = f"blocks={part} names block {part.last}, and the model has {model.depth}, from 0 on"
            yield Problem("P25", what, f"plan.blocks, {model.depth_key}", f"numbers up to {model.depth - 1}")
        if part.says("tp") is not None and plan.tp > 1:
            yield from _left_whole(plan, part, model)


def _left_whole(plan: PlanFields, part: Range, model: Any) -> Iterator[Problem]:
    """Blocks that tp leaves whole see some positions, so they have to attend to those of other ranks."""
    positions, *_ = model.deals("cp") or (None,)
    ranks = plan.tp * plan.cp
    if positions is None or model.deals("ep") is not None:
        what = f"blocks={part}: blocks of a {model.kind} cannot be left whole, each rank with some positions"
        yield Problem("P12", what, "plan.blocks, model.kind", "leave tp out of the range")
    elif positions.size % ranks:
        what = f"blocks={part}: {positions.what} {positions.size} is not split evenly over {ranks} ranks"
        yield Problem("P12", what, f"plan.blocks, {positions.key}", f"a multiple of {ranks}")

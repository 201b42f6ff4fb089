"""`unisono train --dry-run --world N --rank R`: what one rank of a plan holds and calls, counted by its own code."""

from collections.abc import Mapping
from typing import Any

from unisono.config import Loaded, Resolved
from unisono.planner import predict
from unisono.planner.alive import alive
from unisono.planner.memory import Memory
from unisono.planner.model_kinds import Model, kind
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError
from unisono.verbs._sizes import model_of

MIB = 2.0**20


def describe(
    resolved: Resolved, world: int, rank: int, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """(the object of --json, lines). Raises UsageError where there is no such rank."""
    if not 0 <= rank < world:
        raise UsageError(f"--rank {rank}: a world of {world} has ranks 0 to {world - 1}", where="unisono train",
                         fix=f"--rank {world - 1}", code="C04")  # fmt: skip
    from unisono.comm.imagined import imagined
    from unisono.train.build.rehearsal import rehearse
    from unisono.train.data.load import load

    recipe, plan, batch = resolved.recipe, resolved.plan, resolved.batch
    corpus = load(recipe.data, recipe.model)
    with imagined(rank, world) as calls:
        seen = rehearse(recipe, plan, corpus, rank, calls)
    row = seen.at["pp"]
    sums = {key: value for key, value in seen.sums().items() if key[1] != "recv"}
    memory = _priced(Loaded(recipe, plan, {}), batch.micro_batch, batch.micros, row, environ)
    lines = [
        f"rank         {rank} of {world}: {' '.join(f'{axis} {at}' for axis, at in seen.at.items())}",
        f"stages       {', '.join(map(str, seen.stages))} of {plan.schedule}",
        f"parameters   {seen.parameters:,} elements",
        f"memory       {seen.lasting / MIB:.2f} MiB between steps, {seen.peak / MIB:.2f} MiB at most in a step"
        + (f"; priced {memory.allocated / MIB:.2f} MiB" if memory else "; not priced"),
        f"{'calls':<12} {'':<16} {'times':>7} {'bytes':>15}",
    ]
    for (axis, op), (times, nbytes) in sorted(sums.items()):
        lines.append(f"  {axis:<10} {op:<16} {times:>7,} {nbytes:>15,}")
    lines += [f"waits        {where}, {count} a step" for where, count in sorted(seen.waits.items())]
    lines += [f"note         {text}" for text in seen.notes]
    facts = {
        "rank": rank, "world": world, "at": seen.at, "stages": list(seen.stages), "parameters": seen.parameters,
        "bytes": {"lasting": seen.lasting, "peak": seen.peak, "priced": round(memory.allocated) if memory else None},
        "calls": {"/".join(key): list(value) for key, value in sums.items()},
        "waits": dict(seen.waits), "strays": dict(seen.strays), "notes": list(seen.notes),
    }  # fmt: skip
    return {"rehearsal": facts}, lines


def _priced(
    loaded: Loaded, micro_batch: int, micros: int, row: int, environ: Mapping[str, str]
) -> Memory | None:
    """What the planner says that this row holds; None of a model that has no price."""
    try:
        model: Model = model_of(loaded, environ)
    except UsageError:
        return None
    if isinstance(model, Transformer):
        return alive(model, loaded.plan, micro_batch=micro_batch, micros=micros, row=row)
    if loaded.plan.tp > 1:
        return None
    _, stack, _ = predict.here(environ)
    return dict(kind(model).memories(model, loaded.plan, stack, micro_batch, micros)).get(row)

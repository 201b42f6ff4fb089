"""`unisono train --dry-run --world N --rank R`: one rank of a plan by itself, beside what the planner says."""

from collections.abc import Mapping
from typing import Any

from unisono.config import Loaded, Resolved
from unisono.planner import predict
from unisono.planner.alive import alive
from unisono.planner.kinds import Model, kind
from unisono.planner.memory import Memory
from unisono.planner.work.calls import calls
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError
from unisono.verbs._sizes import model_of

MIB = 2.0**20
Sums = Mapping[tuple[str, str], tuple[float, float]]


def told(
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
    with imagined(rank, world) as made:
        seen = rehearse(recipe, plan, corpus, rank, made)
    row = seen.at["pp"]
    sums: Sums = {key: value for key, value in seen.sums().items() if key[1] != "recv"}
    priced, memory = _priced(Loaded(recipe, plan, {}), batch.micro_batch, batch.micros, row, environ)
    lines = [
        f"rank         {rank} of {world}: {' '.join(f'{axis} {at}' for axis, at in seen.at.items())}",
        f"stages       {', '.join(map(str, seen.stages))} of {plan.schedule}",
        f"parameters   {seen.parameters:,} elements",
        f"memory       {seen.lasting / MIB:.2f} MiB between steps, {seen.peak / MIB:.2f} MiB at most in a step"
        + (f"; priced {memory.allocated / MIB:.2f} MiB" if memory else "; not priced"),
        f"{'calls':<12} {'':<16} {'times':>7} {'bytes':>15} {'priced':>9} {'bytes':>15}",
    ]
    differ = {}
    for key in sorted({*sums, *priced}):
        (times, nbytes), (times_p, nbytes_p) = sums.get(key, (0, 0)), priced.get(key, (0, 0))
        if abs(times - times_p) > 0.5 or abs(nbytes - nbytes_p) > 0.01 * max(nbytes, nbytes_p):
            differ["/".join(key)] = {"run": [times, nbytes], "priced": [round(times_p, 2), round(nbytes_p)]}
        mark = "  differs" if "/".join(key) in differ else ""
        lines.append(
            f"  {key[0]:<10} {key[1]:<16} {times:>7,} {nbytes:>15,} {times_p:>9,.4g} {round(nbytes_p):>15,}{mark}"
        )
    lines += [f"waits        {where}, {count} a step" for where, count in sorted(seen.waits.items())]
    lines += [f"note         {text}" for text in seen.notes]
    facts = {
        "rank": rank, "world": world, "at": seen.at, "stages": list(seen.stages), "parameters": seen.parameters,
        "bytes": {"lasting": seen.lasting, "peak": seen.peak, "priced": round(memory.allocated) if memory else None},
        "calls": {"/".join(key): list(value) for key, value in sums.items()}, "differ": differ,
        "waits": dict(seen.waits), "strays": dict(seen.strays), "notes": list(seen.notes),
    }  # fmt: skip
    return {"rehearsal": facts}, lines


def _priced(
    got: Loaded, micro_batch: int, micros: int, row: int, environ: Mapping[str, str]
) -> tuple[Sums, Memory | None]:
    """What the planner says that this row calls and holds; nothing of a model that has no price."""
    try:
        model: Model = model_of(got, environ)
    except UsageError:
        return {}, None
    if got.plan.tp > 1 and not isinstance(model, Transformer):
        return {}, None
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for call in calls(model, got.plan, micro_batch, micros, row, near=False):
        times, nbytes = sums.get((call.axis, call.op), (0.0, 0.0))
        sums[call.axis, call.op] = times + call.times, nbytes + call.nbytes * call.times
    if isinstance(model, Transformer):
        return sums, alive(model, got.plan, micro_batch=micro_batch, micros=micros, row=row)
    _, stack, _ = predict.here(environ)
    memories = dict(kind(model).memories(model, got.plan, stack, micro_batch, micros))
    return sums, memories.get(row)

"""What a run is expected to take, and what it has room for, by the ledger of `planner.alive`: blocks that
`recompute=auto` computes again, the largest micro-batch, and what to change where memory has run out. No torch."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from unisono.config import Loaded, Recipe
from unisono.plan import Plan
from unisono.plan.checks import batch_of, divisors
from unisono.plan.grammar import choice
from unisono.planner import grouping, predict
from unisono.planner.alive import chosen, fullest
from unisono.planner.from_recipe import serving
from unisono.planner.memory import Memory
from unisono.planner.model_kinds import attending, with_optimiser
from unisono.planner.remedies import remedies
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec import words
from unisono.spec.errors import Infeasible, UsageError
from unisono.spec.frames import place
from unisono.spec.model import Facts
from unisono.verbs._sizes import model_of

SHARE = 0.9
"""Of a rank's memory, what a choice may fill: allocators hold some beside what is asked for."""
PROCESS = 300 << 20
"""Bytes of a rank beside what the ledger counts: Python and torch, measured."""
_SHARED = 512.0
"""MiB of a rank that may be Python's and torch's own, which forked ranks share."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes(ranks: int) -> float:
    """Bytes of this host's memory for each of so many ranks on it: the machine's, or those its container may have."""
    most = _machine_bytes()
    with suppress(OSError, ValueError):
        most = min(most, int(_CGROUP.read_text()))
    return float(most) / ranks


def has_gpus() -> bool:
    """Whether the ranks' memory is that of GPUs, as far as one sees without torch."""
    return Path("/dev/nvidiactl").exists()


def expected(recipe: Recipe, plan: Plan, environ: Mapping[str, str]) -> str | None:
    """The text of `prediction.json` for a resolved recipe and plan; None for a model that cannot be priced. Whatever
    comes of it, the run goes on."""
    batch, _ = batch_of(plan, recipe.train)
    if batch is None or ".py:" in recipe.model.kind or recipe.model.kind.startswith("hf:"):
        return None  # to know these in numbers could take torch, which the process that watches the ranks never imports
    try:
        model = model_of(Loaded(recipe, plan, {}), environ)
    except UsageError:
        return None
    try:
        where, stack, calibrated = predict.here(environ)
        where = serving(where, recipe)
        price = predict.predict(model, plan, where, stack, micro_batch=batch.micro_batch, micros=batch.micros)
        prediction = predict.as_json(price, calibrated)
        if (counted := ledger(recipe, plan)) is not None:
            prediction["ledger"] = {
                kind: round(nbytes) for kind, nbytes in asdict(counted[1]).items() if nbytes
            }
    except UsageError as error:
        problem = f"{error.where}: {error.what}" if error.where else error.what
        prediction = {"schema_version": 1, "problem": problem}
    except Exception as error:  # a price is no reason to stop a run: its report says that there was none
        prediction = {"schema_version": 1, "problem": repr(error)}
    return json.dumps(prediction, indent=1)


def require_room(prediction: str | None, ranks: int) -> None:
    """Raises Infeasible where the ranks together would need more than twice the memory of this host: the kernel would
    end them minutes later, or another program for them. Where there are GPUs, the ranks' memory is theirs."""
    mib = max(0.0, json.loads(prediction or "{}").get("mem_mib", 0.0) - _SHARED)
    need, have = mib * ranks / 1024, _machine_bytes() / 2**30
    if need > 2 * have and not has_gpus():
        raise Infeasible(
            f"the ranks need about {need:.3g} GiB together, this machine has {have:.3g}",
            where="model, train.micro_batch, plan",
            likely="a model or a batch that is too large, or a slip of the finger",
            fix="a smaller model or --train.micro_batch; unisono simulate says what takes the memory",
        )


def room_here(ranks: int, environ: Mapping[str, str]) -> float:
    """Bytes for each of so many ranks on this machine, known without torch: those of a measured GPU, or the host's.
    Raises UsageError P19 where nobody has measured the GPUs."""
    if not has_gpus():
        return host_bytes(ranks)
    where, _, is_calibrated = predict.here(environ)
    if not is_calibrated or where.cores:
        what = (
            "--fit-micro-batch needs the memory of this machine's GPUs in numbers, and nobody has measured it"
        )
        raise UsageError(
            what,
            where="train.micro_batch",
            fix="unisono calibrate, once, or --train.micro_batch N",
            code="P19",
        )
    return where.device.memory


def ledger(
    recipe: Recipe, plan: Plan, vocab: int | None = None, apart: bool = False
) -> tuple[int, Memory] | None:
    """(pipeline row, bytes) of the fullest rank of a resolved plan; None for a model whose blocks have no count.
    apart: on a device with copies of its own, which fetches ahead what is offloaded."""
    sizes, batch = _sizes(recipe, vocab), batch_of(plan, recipe.train)[0]
    if sizes is None or batch is None:
        return None
    return fullest(sizes, plan, micro_batch=batch.micro_batch, micros=batch.micros, apart=apart)


def rank_bytes(recipe: Recipe, plan: Plan) -> tuple[float, bool]:
    """(bytes that a rank of a resolved plan takes of its host, by the fullest rank of the ledger; whether it has one).
    Without one they are those of the process alone."""
    counted = ledger(recipe, plan)
    return PROCESS + (0.0 if counted is None else counted[1].total), counted is not None


def settled(
    recipe: Recipe, plan: Plan, capacity: float, vocab: int | None = None, apart: bool = False
) -> tuple[Plan, str]:
    """A plan with recompute=auto as it is played, and what to say of it: the fewest blocks computed again that fit into
    `capacity` bytes. Others as they are, and nothing. Raises Infeasible where all blocks are not enough. apart: as of
    `ledger`."""
    if plan.recompute != "auto":
        return plan, ""
    sizes, batch = _sizes(recipe, vocab), batch_of(plan, recipe.train)[0]
    if sizes is None or batch is None:
        return plan, f"recompute auto: none, as a model of kind {recipe.model.kind} has no ledger by blocks"
    batch_sizes = {"micro_batch": batch.micro_batch, "micros": batch.micros, "apart": apart}
    got = chosen(sizes, plan, SHARE * capacity, **batch_sizes)
    if got is None:
        need = fullest(sizes, replace(plan, recompute="full"), **batch_sizes)[1].total
        raise Infeasible(
            f"recompute=auto: with every block computed again a rank needs {words.nbytes(need)}, and there are"
            f" {words.nbytes(capacity)}",
            where="plan.recompute, train.micro_batch",
            fix=_nearest(recipe, replace(plan, recompute="full"), capacity, vocab, apart),
        )
    need = fullest(sizes, got, **batch_sizes)[1].total
    said = grouping.again_in_words(sizes, got)
    return got, f"recompute auto: {said}; {words.nbytes(need)} of {words.nbytes(capacity)} a rank"


def out_of_memory(
    error: BaseException,
    recipe: Recipe,
    plan: Plan,
    capacity: float,
    vocab: int | None = None,
    apart: bool = False,
) -> Infeasible:
    """The error of ours for one of memory: the ledger, and the nearest plan that fits. apart: as of `ledger`."""
    counted = ledger(recipe, plan, vocab, apart)
    said = str(error).strip().splitlines() or [""]
    what = f"out of memory: {said[0][:200]}" if said[0] else "out of memory"
    if counted is None:
        fix = "a smaller train.micro_batch, recompute=full, or shard=N in the plan"
        return Infeasible(
            what, where=place(error), likely="the plan does not fit this machine's memory", fix=fix
        )
    row, memory = counted
    parts = {
        "weights": memory.params, "gradients": memory.grads, "optimiser": memory.optim,
        "activations": memory.activations, "communication": memory.communication,
    }  # fmt: skip
    listed = ", ".join(f"{name} {words.nbytes(size)}" for name, size in parts.items() if size)
    likely = f"a rank of stage row {row} needs {words.nbytes(memory.total)}: {listed}; it has {words.nbytes(capacity)}"
    room = min(capacity, 0.8 * memory.total)  # it did not fit, whatever was thought to be there
    return Infeasible(what, where=place(error), likely=likely, fix=_nearest(recipe, plan, room, vocab, apart))


def with_largest_micro_batch(
    loaded: Loaded, ranks: int | None, environ: Mapping[str, str], capacity: float | None = None
) -> tuple[Loaded, str]:
    """The recipe with the largest micro-batch that fits, and what to say of it. Of the recipe it changes which samples
    are one leaf, so sums round otherwise, and `sync=canonical` has other bits; nothing else.

    ranks: that exist already. Raises UsageError where the batch is given already, Infeasible where no size fits.
    """
    recipe = loaded.recipe
    if recipe.train.micro_batch is not None or loaded.plan.micros is not None:
        what = "--fit-micro-batch finds the micro-batch, and the recipe or the plan says it"
        raise UsageError(
            what,
            where="train.micro_batch, plan.micros",
            fix="leave train.micro_batch and micros out",
            code="C06",
        )
    plan = loaded.plan.fill(ranks or recipe.launch.ranks)
    sizes = _sizes(recipe, None)
    if sizes is None:
        what = f"--fit-micro-batch: a model of kind {recipe.model.kind} has no ledger"
        raise UsageError(what, where="model.kind", fix="--train.micro_batch N", code="C06")
    room = room_here(plan.world, environ) if capacity is None else capacity
    share = recipe.train.global_batch // plan.replicas
    for size in sorted(divisors(share), reverse=True):
        train = recipe.train.model_copy(update={"micro_batch": size})
        tried = recipe.model_copy(update={"train": train})
        filled = replace(plan, micros=share // size)
        if filled.check(tried):
            continue
        # With recompute=auto a micro-batch fits if it fits with all blocks computed again.
        most_again = replace(filled, recompute="full") if filled.recompute == "auto" else filled
        _, memory = fullest(sizes, most_again, micro_batch=size, micros=share // size)
        if memory.total <= SHARE * room:
            takes = f"{words.nbytes(memory.total)} of {words.nbytes(room)} a rank"
            note = f"micro_batch {size}: the largest that fits, {takes}"
            origins = {**loaded.origins, "train.micro_batch": "found: --fit-micro-batch"}
            return replace(loaded, recipe=tried, origins=origins), note
    raise Infeasible(
        f"no micro-batch fits into {words.nbytes(room)} a rank",
        where="train.micro_batch, plan",
        fix=_nearest(recipe, replace(plan, micros=share), room, None),
    )


def _nearest(recipe: Recipe, plan: Plan, room: float, vocab: int | None, apart: bool = False) -> str:
    """The change to a plan that costs least time and fits, in words."""
    sizes, batch = _sizes(recipe, vocab), batch_of(plan, recipe.train)[0]
    if sizes is None or batch is None:
        return "a smaller train.micro_batch, recompute=full, or shard=N in the plan"
    ways: list[tuple[str, Plan, int, int]] = list(
        remedies(plan, batch.micro_batch, batch.micros, sizes.n_layer)
    )
    base = (plan, batch.micro_batch, batch.micros)
    ways += _put_away([("", *base), *ways])
    for said, other, micro_batch, micros in ways:
        if fullest(sizes, other, micro_batch=micro_batch, micros=micros, apart=apart)[1].total > room:
            continue
        train = recipe.train.model_copy(update={"micro_batch": micro_batch})
        if not replace(other, micros=micros).check(recipe.model_copy(update={"train": train})):
            return f"{said}, the nearest that fits by the ledger"
    return "more ranks or a smaller model: no plan of as many ranks fits by the ledger"


def _put_away(ways: Sequence[tuple[str, Plan, int, int]]) -> list[tuple[str, Plan, int, int]]:
    """The ways with more and more of the state on disk."""
    return [
        (f"{said} offload={what}".strip(), replace(plan, offload=what), micro_batch, micros)
        for what in ("optimizer:to=disk", "params:to=disk+activations")
        for said, plan, micro_batch, micros in ways
        if choice(plan.offload).name == "none"
    ]


def _sizes(recipe: Recipe, vocab: int | None) -> Transformer | None:
    if not recipe.model.attends:
        return None
    known = recipe.model.sized(Facts(vocab=vocab)).vocab or 256  # bytes, where only the data knows
    averages = sum(section.kept for section in recipe.sections())
    return attending(with_optimiser(transformer(recipe.model, known), recipe.train.optimiser(), averages))

"""`unisono train` inside one rank."""

import platform
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

# For its effect: torch.optim draws this in with the first optimiser, which takes as long as half of torch itself. Once
# in the helper, before the fork, is cheaper than in every rank.
import torch._dynamo

from unisono import __version__
from unisono.comm.device import arithmetic, is_apart, notes, of_rank, properties
from unisono.config import Recipe, Resolved, resolve
from unisono.launch.agree import Facts, agree, tell
from unisono.launch.context import RankContext
from unisono.launch.inspect_folder import ALIVE
from unisono.launch.pace import margin
from unisono.launch.run.membership import Role
from unisono.parallel.precision import dtype_of
from unisono.plan import Batch, Plan
from unisono.spec.beside import BesideRanks
from unisono.spec.finder import contributed
from unisono.spec.frames import is_memory
from unisono.spec.runs import has_checkpoint
from unisono.sync import POLICIES
from unisono.train.build.build import Place, model_of, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load
from unisono.train.rank_order import RankOrder
from unisono.train.recovery.fault_injection import injector_of
from unisono.train.recovery.replication import SnapshotReplicas
from unisono.train.recovery.snapshot_buffer import SnapshotBuffer
from unisono.train.session import session
from unisono.train.state.checkpoint.find import by_age
from unisono.train.state.pinned_choices import COLLECTIVE, SYNC, pinned
from unisono.train.state.resume import choose, identity
from unisono.train.state.writing import locked
from unisono.verbs.train.folder import Newest, make_run_dir, newest
from unisono.verbs.train.order import TrainOrder
from unisono.verbs.train.room import host_bytes, out_of_memory, settled

_AFTER_A_KILL = 30.0
"""Seconds for which ranks that were just killed may hold the folder's lock: they give much memory back first."""


def prepare(argument: dict[str, Any]) -> Corpus:
    """Before the fork: read the data, and draw in once what every rank would."""
    recipe = TrainOrder.read(argument).recipe
    corpus = load(recipe.data, recipe.model)
    if recipe.model.imports:
        model_of(recipe, corpus)
    return corpus


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Train; returns the summary, with the run folder."""
    order = TrainOrder.read(argument)
    if ctx.role is Role.SAMPLER:
        sampler = contributed("unisono.train.samplers.process")
        return sampler.main(ctx, order.recipe, corpus, _dtype(order), order.run_dir)
    if ctx.rendezvous is not None:
        return _join(ctx, order, corpus)
    resolved = agree(ctx, "order", lambda: _resolved(order, ctx.world), lambda it: facts_of(ctx, it, corpus))
    recipe, plan = resolved.recipe, resolved.plan
    place = _place(ctx, recipe)
    with ExitStack() as held:
        chosen = _agree_on_folder(ctx, order, recipe, held)
        if chosen.done is not None:
            _all_heard(ctx)
            return {**chosen.done, "stopped": False, "over": True}
        if (run_dir := chosen.run_dir) is None:
            raise TypeError("rank 0 names a folder")
        order = replace(order, resume=chosen.resumes if order.auto else order.resume)
        argument["run_dir"] = str(
            run_dir
        )  # the caller's own: should this rank fail, it knows where to say so
        ctx.appear(run_dir / ALIVE)
        if ctx.rank == 0 and ctx.world > 1:
            ctx.channel.send("note", text=ctx.means)
        again = ctx.epoch > 0 and tell(ctx, "again", lambda: bool(by_age(run_dir)))
        resume = _agree_on_checkpoint(ctx, order, run_dir, recipe, corpus) if order.resume or again else None
        if resume is not None:  # what was measured then is not measured anew
            said = tell(ctx, "collective", lambda: pinned(run_dir, plan.collective, plan.dp, COLLECTIVE))
            sync = tell(ctx, "sync", lambda: pinned(run_dir, plan.sync, plan.dp, SYNC))
            plan = replace(plan, collective=said, sync=sync)
        room = properties(place.device).get("memory") or host_bytes(ctx.local_world)
        plan, said = _agree_on_recomputation(ctx, recipe, plan, room, corpus, is_apart(place.device))
        if said and ctx.rank == 0:
            ctx.channel.send("note", text=said)
        training = _order(ctx, order, run_dir, recipe, plan, replace(place, speeds=order.speeds), resume)
        training.faults.reached("start")
        if ctx.rank == 0:  # whoever takes a lost rank's place does not agree on it again
            ctx.channel.send("settled", argument={"run_dir": str(run_dir), "plan": str(plan)})
        return _train(ctx, training, corpus, room)


def _resolved(order: TrainOrder, world: int) -> Resolved:
    """The order as all ranks have to hold it. What deals leaves by speed was resolved by who chose it."""
    if not order.speeds:
        return resolve(order.recipe, order.plan, world)
    train, plan = order.recipe.train, order.plan
    batch = Batch(train.global_batch, train.micro_batch or 1, plan.micros or 1, plan.replicas)
    return Resolved(order.recipe, plan, {}, batch)


def _join(ctx: RankContext, order: TrainOrder, corpus: Corpus) -> dict[str, Any]:
    """Take a lost rank's place among others that train."""
    recipe, run_dir = order.recipe, order.run_dir  # resolved, and settled among those that began
    if run_dir is None:
        raise ValueError("a rank that joins others is told their run folder")
    place = _place(ctx, recipe)
    training = _order(ctx, order, run_dir, recipe, order.plan, place, None)
    room = properties(place.device).get("memory") or host_bytes(ctx.local_world)
    with ExitStack() as held:
        if ctx.rank == 0:
            held.enter_context(locked(run_dir, _AFTER_A_KILL))
        ctx.appear(run_dir / ALIVE)
        return _train(ctx, training, corpus, room)


def _dtype(order: TrainOrder) -> torch.dtype:
    """In which the ranks of an order compute."""
    resolved = resolve(order.recipe, order.plan, order.plan.world)
    return dtype_of(resolved.plan.precision)


def _place(ctx: RankContext, recipe: Recipe) -> Place:
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, margin(recipe.launch.timeout))
    beside = None
    if hasattr(ctx.store, "across"):  # of our own supervisor, who can start processes beside the ranks
        beside = BesideRanks(
            ctx.store.across(), ctx.run_token, lambda text: ctx.channel.send("note", text=text)
        )
    return replace(
        place, host=ctx.rank - ctx.local_rank, beside=beside
    )  # ranks of one host follow each other


def _order(
    ctx: RankContext,
    order: TrainOrder,
    run_dir: Path,
    recipe: Recipe,
    plan: Plan,
    place: Place,
    resume: Path | None,
) -> RankOrder:
    """What this rank's session is to do, with where its snapshots lie: nowhere if nobody outlives it."""
    buffer = SnapshotBuffer(ctx.shelf) if ctx.shelf else None
    return RankOrder(
        recipe,
        plan,
        run_dir,
        resume,
        replace(place, scratch=run_dir),
        ctx.store,
        ctx.channel,
        ctx.host,
        ctx.run_token,
        _last_bits(ctx),
        ctx.epoch,
        ctx.rendezvous,
        buffer,
        SnapshotReplicas(buffer) if buffer is not None else None,
        injector_of(order.chaos, run_dir, ctx.rank),
        order.until,
    )


def _train(ctx: RankContext, order: RankOrder, corpus: Corpus, room: float) -> dict[str, Any]:
    """The session, and what the summary says beside it. room: bytes of memory that this rank has."""
    try:
        summary = session(order, corpus)
    except Exception as error:
        if not is_memory(error):
            raise
        apart = is_apart(order.place.device)
        raise out_of_memory(error, order.recipe, order.plan, room, corpus.vocab, apart) from error
    finally:
        for line in notes(order.place.device):
            ctx.channel.send("note", text=line)
    return {
        "run_dir": str(order.run_dir),
        "resumed_from": order.resume.name if order.resume is not None else None,
        "recompute": order.plan.recompute,
        **summary,
    }


def _agree_on_recomputation(
    ctx: RankContext, recipe: Recipe, plan: Plan, room: float, corpus: Corpus, apart: bool
) -> tuple[Plan, str]:
    """What recompute=auto comes to, by the room of rank 0: ranks that compute again gather again, all or none."""
    if plan.recompute != "auto":
        return plan, ""

    def choose_here() -> list[str]:
        got, said = settled(recipe, plan, room, corpus.vocab, apart)
        return [got.recompute, said]

    word, said = tell(ctx, "recompute", choose_here)
    return replace(plan, recompute=word), said


def facts_of(ctx: RankContext, resolved: Resolved, corpus: Corpus) -> Facts:
    """What this rank holds of all that ranks must hold alike, the most telling first.

    Where the run writes and how ranks are started may differ. Devices and threads decide about the last bits alone, so
    they count only where those are promised.
    """
    recipe = resolved.recipe.model_dump(mode="json", exclude={"launch", "out"})
    facts = {
        "unisono": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plan": str(resolved.plan),
        **{key: recipe[key] for key in ("name", "seed")},
        **{f"{part}.{key}": recipe[part][key] for part in ("model", "data", "train") for key in recipe[part]},
        "backend": ctx.backend,
        "data": corpus.fingerprint,
    }
    if not POLICIES.read(resolved.plan.sync).leafwise:
        return facts
    return {**facts, **_last_bits(ctx)}


def _last_bits(ctx: RankContext) -> Facts:
    """What the last bits of a sum depend on beside the plan."""
    return {"device": arithmetic(of_rank(ctx.backend, ctx.local_rank)), "threads": ctx.threads}


def _agree_on_checkpoint(
    ctx: RankContext, order: TrainOrder, run_dir: Path, recipe: Recipe, corpus: Corpus
) -> Path:
    """Rank 0 looks for the newest whole checkpoint, which may take it minutes; the others see whether they have it."""

    def chosen() -> str:
        folder, notes = choose(run_dir, recipe, corpus.fingerprint, _last_bits(ctx), order.checkpoint)
        for note in notes:
            ctx.channel.send("note", text=note)
        return str(folder)

    folder = Path(tell(ctx, "checkpoint", chosen))
    agree(ctx, "checkpoint here", lambda: identity(folder), lambda save: {"checkpoint": save})
    return folder


def _all_heard(ctx: RankContext) -> None:
    """Rank 0, whose store it may be, leaves after the others have read all that they need."""
    ctx.store.set(f"heard/{ctx.rank}", "")
    for rank in range(ctx.world if ctx.rank == 0 else 0):
        ctx.store.get(f"heard/{rank}")


def _agree_on_folder(ctx: RankContext, order: TrainOrder, recipe: Recipe, held: ExitStack) -> Newest:
    """The supervisor's folder or, where every rank was started by others, rank 0's; rank 0 locks it."""

    def choose_here() -> dict[str, Any]:
        newest_run = Newest(order.run_dir)
        if newest_run.run_dir is None and order.auto:
            newest_run = newest(recipe)
        if newest_run.done is not None:
            return newest_run.as_json()
        if order.run_dir is None:
            folder = newest_run.run_dir or make_run_dir(recipe, order.config_text)
            ctx.channel.send("folder", path=str(folder), new=newest_run.run_dir is None)
            newest_run = replace(newest_run, run_dir=folder)
        if newest_run.run_dir is not None:
            again = ctx.epoch or order.launches
            held.enter_context(
                locked(newest_run.run_dir, _AFTER_A_KILL) if again else locked(newest_run.run_dir)
            )
            newest_run = replace(newest_run, resumes=order.auto and has_checkpoint(newest_run.run_dir))
        return newest_run.as_json()

    return Newest.of(tell(ctx, "run_dir", choose_here))

"""A whole run on one rank: join, build, resume, loop, evaluate, save, end."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from unisono.comm.device import of_rank
from unisono.comm.ways import ways
from unisono.config import Recipe
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import last_step
from unisono.observe.span import Recorder
from unisono.parallel.play import StagePlayer
from unisono.plan import Plan
from unisono.plan.fidelity import needs_like_threads
from unisono.programs.schedules import SCHEDULES
from unisono.spec.rendezvous import Rendezvous
from unisono.spec.sink import SINKS, Observer, RunFacts
from unisono.spec.training import METRICS
from unisono.train.ahead import AheadUpdate, run_ahead
from unisono.train.blame import blame, odd_loss
from unisono.train.build import Place, build, connect, feeds
from unisono.train.checkpoint import Box, Saver
from unisono.train.checkpoint.find import FOLDER, by_age, first_whole
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Feed, Permuted
from unisono.train.evaluate import evaluate
from unisono.train.flow import unflushed
from unisono.train.guard import install
from unisono.train.handover import NotHeld, PeerMemory
from unisono.train.run import Run
from unisono.train.sample import sample
from unisono.train.settled import keep, keep_sync
from unisono.train.state import kept_of, pieces_of, refill, restore
from unisono.train.step import train
from unisono.train.update import Report
from unisono.train.watch import Journal, LiveTable, Uplink
from unisono.train.whole import PlayedModel, asked
from unisono.train.writing import writing


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What one rank is told. recipe and plan are resolved. resume: a checkpoint's folder, or None.

    token: shared by all ranks. epoch: in which this rank began; both together are new at each start. rendezvous: that
    in which this rank, a new process, takes a lost one's place; None at a start. last_bits: what the last bits of a sum
    depend on beside the plan, by name; checkpoints keep it.
    """

    recipe: Recipe
    plan: Plan
    run_dir: Path
    resume: Path | None
    place: Place
    store: dist.Store | None
    line: Uplink
    host: str
    token: str
    last_bits: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    rendezvous: Rendezvous | None = None


@dataclass(slots=True)
class Live:
    """A session under way."""

    order: RankOrder
    run: Run
    feed: Feed
    val: Permuted
    saver: Saver
    journal: Journal
    check: Callable[[], None]  # that copies are equal, where the run is guarded
    val_losses: list[tuple[int, float]]
    targets: int  # of one step, over all ranks
    corpus: Corpus
    saved: str = ""
    begun_from: Path | None = None  # the checkpoint
    said: str = ""  # what was told last of what the policy chose
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation


def session(order: RankOrder, corpus: Corpus) -> dict[str, Any]:
    """Train to the recipe's last step, or until asked to stop; the summary is the same on every rank.

    Raises UsageError for a checkpoint that is damaged or of another model, UserCodeError when numbers go bad.
    """
    rendezvous, live = order.rendezvous, None if order.rendezvous else _start(order, corpus)
    kept = Remembered(live.run, live.val_losses) if live is not None else Remembered()
    try:
        while True:
            try:
                if rendezvous is not None:
                    live = _rejoin(order, rendezvous, corpus, kept, live)
                    kept.run, kept.val_losses, rendezvous = live.run, live.val_losses, None
                if live is None:
                    raise ValueError("a rank without a run needs a rendezvous")
                return _play(live, corpus)
            except Exception as error:
                rendezvous = order.line.rendezvous(error)
                if rendezvous is None:
                    raise
    finally:
        if live is not None:
            with suppress(OSError):  # what is under way, if anything, is the better story
                live.journal.close()


def _play(live: Live, corpus: Corpus) -> dict[str, Any]:
    order, run, recipe = live.order, live.run, live.order.recipe
    order.line.send("ready", coords=run.mesh.at, step=run.step)
    begun, first, last, seconds = time.perf_counter(), run.step, None, 0.0
    clock = begun
    for report in train(run, live.feed, recipe.train.steps, order.line.stop_requested):
        last = report
        now = time.perf_counter()
        seconds += now - clock
        _look(live, report, now - clock)
        if not report.finite:
            _give_up(live, report)
        if report.step == 0 and (odd := odd_loss(recipe, corpus.classes, report.loss)):
            _note(order, odd)
        _between(live, report)
        clock = time.perf_counter()
    stopped = last is not None and last.stop and run.step < recipe.train.steps
    if not stopped:
        _validate(live)
    # A run resumed at its end has nothing new to save.
    folder = live.begun_from if run.step == first and live.begun_from else _save(live, blocking=True)
    live.feed.close()
    tokens = (run.step - first) * live.targets
    summary = {
        "steps": run.step,
        "loss": last.loss if last else None,
        "val_loss": live.val_losses[-1][1] if live.val_losses else None,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "seconds": time.perf_counter() - begun,
        "stopped": stopped,
        "checkpoint": str(folder),
        "resident_mib": peak_rss_mib(),
        "away_bytes": run.local.store.most,
        "val": live.val_losses,
        "val_metrics": live.metrics,
    }
    if corpus.shares is not None:
        summary["samples"] = corpus.shares(recipe.seed, run.step * recipe.train.global_batch)
    if order.place.rank == 0 and not stopped and folder is not None:
        summary["sample"] = sample(folder, recipe, corpus)
    return summary


def _start(order: RankOrder, corpus: Corpus) -> Live:
    recipe, plan, place = order.recipe, order.plan, order.place
    connect(place, order.store)
    recorder = Recorder(place.rank)
    here, fresh = replace(place, scratch=order.run_dir), order.resume is None
    run = build(recipe, plan, here, corpus, recorder, filled=fresh)
    post = run.player.post if isinstance(run.player, StagePlayer) else None
    for said in ways(run.mesh, place.device, post.says() if post is not None else ""):
        _note(order, said)
    if place.rank == 0:
        with writing(order.run_dir):
            keep(order.run_dir, plan.collective, run.mesh)
            keep_sync(order.run_dir, plan.sync, run.sync)
    if SCHEDULES.read(plan.schedule).measured and plan.pp > 1:
        _note(order, f"stages by measured seconds: {'/'.join(map(str, run.local.blocks))} blocks")
    if schedule := unflushed(plan):
        _note(order, schedule.loses(plan.pp, len(run.leaves)))
    if needs_like_threads(plan) and recipe.launch.threads_per_rank is None and "threads" in order.last_bits:
        threads = order.last_bits["threads"]
        _note(order, f"same bits as one device with {threads} threads, which is what each rank has here;"
                     f" --launch.threads_per_rank {threads} keeps that number in other runs")  # fmt: skip
    for said in (*run.local.told, *corpus.told):
        _note(order, said)
    state = restore(run, order.resume) if order.resume is not None else {}
    live = _enter(order, run, corpus, state, order.resume, order.epoch)
    _tell_choice(live)
    return live


def _enter(
    order: RankOrder, run: Run, corpus: Corpus, state: Mapping[str, Any], folder: Path | None, epoch: int
) -> Live:
    """All that a run has beside itself while it trains. state: what was kept beside tensors, in the checkpoint `folder`
    if there is one. Every rank calls it, or it hangs."""
    recipe, place = order.recipe, order.place
    if said := run_ahead(run, recipe.train):
        _note(order, said)
    feed, val = feeds(recipe, order.plan, corpus, place.device)
    check = install(run, recipe.train.guard, partial(_note, order))
    # All ranks must have read what is there before any writes over it.
    run.mesh.world.barrier()
    saver = Saver(order.run_dir, place.rank, place.world, token=f"{order.token}-{epoch}", keep=3)
    targets = recipe.train.global_batch * corpus.train.fetch(np.zeros(1, dtype=np.int64))[1].numel()
    with writing(order.run_dir):
        journal = Journal(_observers(order, run), targets)
    saved = f"{folder.parent.name}/{folder.name}" if folder is not None else ""
    return Live(order, run, feed, val, saver, journal, check, _losses(state), targets, corpus, saved, folder)


def _losses(state: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Of validations, by step."""
    return [(int(step), float(loss)) for step, loss in state.get("val", ())]


@dataclass(slots=True)
class Remembered:
    """What this rank holds of the run for a rendezvous to come: nothing where it is new."""

    run: Run | None = None
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)  # steps told, see Journal


def _rejoin(
    order: RankOrder, rendezvous: Rendezvous, corpus: Corpus, kept: Remembered, old: Live | None
) -> Live:
    """The run among ranks that meet anew. old: as it was here before; None on a rank that is new. Its state comes from
    the ranks' memory or, where they do not hold all of it, from the newest checkpoint. Every rank calls it, or it
    hangs."""
    place, recorder = order.place, Recorder(order.place.rank)
    if old is not None:
        with suppress(OSError):
            old.journal.close()
        kept.recent = old.journal.recent()
        old.feed.close()
    memory = _remembered(order, rendezvous, kept)
    connect(place, rendezvous.store)
    run = build(
        order.recipe, order.plan, replace(place, scratch=order.run_dir), corpus, recorder, filled=False
    )
    try:
        state, folder = refill(run, memory), None
    except NotHeld as missing:
        folder = _newest(order, rendezvous)
        if folder is None:
            run = build(order.recipe, order.plan, replace(place, scratch=order.run_dir), corpus, recorder)
        state = restore(run, folder) if folder is not None else {}
        _note(order, f"{missing}: going on from {folder.name if folder else 'the beginning'}")
    kept.run, kept.val_losses = run, _losses(state)  # should one more be lost before all train again
    live = _enter(order, run, corpus, state, folder, rendezvous.epoch)
    if old is None and order.place.rank == 0:
        with writing(order.run_dir):
            live.journal.catch_up(state.get("recent", ()), last_step(order.run_dir / "metrics.jsonl"))
    return live


def _remembered(order: RankOrder, rendezvous: Rendezvous, kept: Remembered) -> PeerMemory:
    """What ranks hold of the run: nothing where an update was under way, or where updates follow their step."""
    place, run, boxes = order.place, kept.run, list[Box]()
    holds = run is not None and run.whole and not isinstance(run.update, AheadUpdate)
    if run is not None and holds and unflushed(order.plan) is None:
        boxes = [*pieces_of(run), *kept_of(run)]
    step, state = (
        (run.step, {"val": kept.val_losses, "recent": kept.recent}) if run is not None and boxes else (-1, {})
    )
    return PeerMemory(place.rank, place.world, rendezvous.store, boxes, step, state, place.device)


def _newest(order: RankOrder, rendezvous: Rendezvous) -> Path | None:
    """The newest whole checkpoint, as rank 0 sees it."""
    if order.place.rank == 0:
        folder, faults = first_whole(by_age(order.run_dir))
        for fault in faults:
            _note(order, fault)
        rendezvous.store.set("checkpoint", folder.name if folder is not None else "")
    name = rendezvous.store.get("checkpoint").decode()
    return order.run_dir / FOLDER / name if name else None


def _note(order: RankOrder, text: str) -> None:
    if order.place.rank == 0:
        order.line.send("note", text=text)


def _observers(order: RankOrder, run: Run) -> list[Observer]:
    """The live table, the sinks that every run has, and those of `out.track`."""
    recipe, place = order.recipe, order.place
    facts = RunFacts(
        order.run_dir, place.rank, place.world, order.host, place.backend, run.mesh.at, run.step, recipe.train.steps,
        run.recorder, run.mesh.dp.says(),
    )  # fmt: skip
    traced = [f"trace:steps={recipe.train.trace_steps}"] if recipe.train.trace_steps else []
    sinks = {sink.name: sink for sink in map(SINKS.read, ("metrics", "events", *traced, *recipe.out.track))}
    return [
        LiveTable(order.line, recipe.train.steps, run.mesh.at["pp"]),
        *(sink.open(facts) for sink in sinks.values() if sink.every_rank or place.rank == 0),
    ]


def _look(live: Live, report: Report, seconds: float) -> None:
    train, made = live.order.recipe.train, live.run.step
    report = replace(report, says={**report.says, **live.run.sync.told()})
    _tell_choice(live)
    validates = made >= train.steps or (train.eval_every and made % train.eval_every == 0)
    with writing(live.order.run_dir):
        live.journal.add(report, live.run.recorder.lap(), seconds, more=bool(validates))


def _tell_choice(live: Live) -> None:
    """What the policy has chosen by measuring, when it is new."""
    if (said := live.run.sync.says()) != live.said:
        live.said = said
        _note(live.order, f"codec: {said}")


def _between(live: Live, report: Report) -> None:
    """Evaluations and checkpoints that fall between this step and the next."""
    train, made = live.order.recipe.train, live.run.step
    _announce(live, live.saver.poll())
    if report.stop or made >= train.steps:
        return
    if train.eval_every and made % train.eval_every == 0:
        _validate(live)
    if train.save_every and made % train.save_every == 0:
        _save(live, blocking=not train.async_save)
    live.run.recorder.lap()


def _validate(live: Live) -> None:
    """The loss and the metrics of some batches, if any are held out, and what a function of the user's says."""
    train, told = live.order.recipe.train, dict[str, float]()
    if not live.val.samples and train.evaluate is None:
        return
    if live.order.place.rank == 0:
        live.order.line.send("doing", text=f"validating, {train.eval_batches} batches")
    if live.val.samples:
        batches = [live.val.fetch(i, live.run.leaves) for i in range(train.eval_batches)]
        loss, live.metrics = evaluate(live.run, batches, [METRICS.read(text) for text in train.metrics])
        live.val_losses.append((live.run.step, loss))
        told["loss"] = loss
    if train.evaluate is not None:
        live.metrics |= asked(train.evaluate, PlayedModel(live.run, live.corpus))
    told |= live.metrics
    live.journal.beside({f"val_{name}": value for name, value in told.items()})
    if live.order.place.rank == 0:
        live.order.line.send("val", step=live.run.step, **{"loss": None, **told})


def _save(live: Live, blocking: bool) -> Path | None:
    order, step = live.order, live.run.step
    live.check()  # what is kept is what all replicas agree on
    with writing(order.run_dir):
        live.journal.flush()  # a run resumed from here makes no line again that is missing
    state = {
        "step": step,
        "data": {"fingerprint": live.corpus.fingerprint},
        "plan": str(order.plan),
        "last_bits": dict(order.last_bits),
        "val": [pair for pair in live.val_losses if math.isfinite(pair[1])],
        "recipe": order.recipe.model_dump(mode="json"),
        "cut_names": {name: list(own) for name, own in live.run.local.cut_names.items()},
    }
    _announce(live, live.saver.wait())
    folder = live.saver.save(step, [*pieces_of(live.run), *kept_of(live.run)], state, blocking)
    _announce(live, folder)
    return folder


def _announce(live: Live, folder: Path | None) -> None:
    """A checkpoint is known from the moment that it is whole on disk, not before."""
    if folder is not None:
        live.saved = f"{folder.parent.name}/{folder.name}"
        if live.order.place.rank == 0:
            live.order.line.send("saved", path=live.saved)


def _give_up(live: Live, report: Report) -> None:
    leaves = live.feed.fetch(report.step, live.run.leaves)
    _announce(live, live.saver.wait())
    error = blame(live.run, leaves, report, live.order.place.rank, live.saved)
    if error is not None:
        raise error
    live.run.mesh.world.barrier()  # the rank to blame has raised; the supervisor stops the others here


def place_of(rank: int, world: int, local_rank: int, backend: str, timeout: float) -> Place:
    """A rank's device: its own GPU under NCCL, the CPU under Gloo."""
    return Place(rank, world, of_rank(backend, local_rank), backend, timedelta(seconds=timeout))

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

from unisono.comm.device import of_rank
from unisono.comm.ways import ways
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import last_step
from unisono.parallel.play import StagePlayer
from unisono.plan.fidelity import needs_like_threads
from unisono.programs.schedules import SCHEDULES
from unisono.spec.rendezvous import Paused, Rendezvous
from unisono.spec.sink import SINKS, Observer, RunFacts
from unisono.spec.training import METRICS
from unisono.train.build.build import Place, build, connect, feeds
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Feed, Permuted
from unisono.train.keeping import announce, beside_tensors, drain_parts, end
from unisono.train.rank_order import RankOrder
from unisono.train.recovery.drain import Drain
from unisono.train.recovery.rejoin import Remembered, handed_over, losses, regained
from unisono.train.recovery.snapshots import Snapshots, among
from unisono.train.sample import sample
from unisono.train.state import history
from unisono.train.state.cadence import Chosen, Clock, Fixed, cadence_of
from unisono.train.state.checkpoint import Saver
from unisono.train.state.checkpoint.mirror import Mirroring, place_at
from unisono.train.state.pinned_choices import keep, keep_sync
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.state.saving import Saving
from unisono.train.state.writing import writing
from unisono.train.step.ahead import run_ahead
from unisono.train.step.evaluate import evaluate
from unisono.train.step.flow import unflushed
from unisono.train.step.played_model import PlayedModel, asked
from unisono.train.step.run import Run
from unisono.train.step.update import Report
from unisono.train.watch.bad_steps import BadSteps
from unisono.train.watch.guard import install
from unisono.train.watch.journal import Journal, LiveTable
from unisono.train.watch.locate_nan import blame, odd_loss


@dataclass(slots=True)
class Live:
    """A session under way."""

    order: RankOrder
    run: Run
    feed: Feed
    bad: BadSteps
    val: Permuted
    saver: Saving
    journal: Journal
    check: Callable[[], None]  # that copies are equal, where the run is guarded
    val_losses: list[tuple[int, float]]
    targets: int  # of one step, over all ranks
    corpus: Corpus
    snapshots: Snapshots
    saved: str = ""
    begun_from: Path | None = None  # the checkpoint
    said: str = ""  # what was told last of what the policy chose
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    clock: Clock = field(default_factory=Clock)
    looked: int = 0  # steps that are written down
    cadence: Fixed | Chosen = field(default_factory=Fixed)


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
                    order = order.at(rendezvous)
                    if live is not None:
                        ending, live = (
                            live,
                            None,
                        )  # once: another rank may be lost before this one trains again
                        _settle(ending, kept)
                    if order.place.rank >= order.place.world:
                        handed_over(order, rendezvous, kept)
                        return {"left": True}
                    live = _rejoin(order, rendezvous, corpus, kept)
                    kept.run, kept.val_losses, rendezvous = live.run, live.val_losses, None
                if live is None:
                    raise ValueError("a rank without a run needs a rendezvous")
                with Drain(drain_parts(live)):
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
    for report in live.bad.steps(recipe.train.steps, order.line.stop_requested):
        if live.bad.goes_back(report) and _went_back(live, report):
            clock = time.perf_counter()
            continue
        last = report
        now = time.perf_counter()
        seconds += now - clock
        live.clock.stepped(now - clock)
        _look(live, report, now - clock)
        if report.bad and not report.skipped:
            _give_up(live, report)
        live.snapshots.stepped(now - clock, {"val": list(live.val_losses), "bad": live.bad.state()})
        if report.step == 0 and (odd := odd_loss(recipe, corpus.classes, report.loss)):
            _note(order, odd)
        _between(live, report)
        clock = time.perf_counter()
    stopped = last is not None and last.stop and run.step < recipe.train.steps
    if stopped and _moves(order, run.step):
        raise Paused
    if not stopped:
        _validate(live)
    # A run resumed at its end has nothing new to save.
    made = run.step > first or live.begun_from is None
    folder = _save(live, blocking=True, last=True) if made else live.begun_from
    with writing(order.run_dir):
        live.journal.flush(must=True)
    live.saver.close(5.0 if stopped else None)  # who was asked to stop may be killed soon
    live.feed.close()
    live.val.close()
    end(live)
    tokens = (run.step - first) * live.targets
    summary = {
        "steps": run.step,
        "loss": last.loss if last and math.isfinite(last.loss) else None,
        "val_loss": live.val_losses[-1][1] if live.val_losses else None,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "seconds": time.perf_counter() - begun,
        "stopped": stopped,
        "checkpoint": str(folder),
        "resident_mib": peak_rss_mib(),
        "away_bytes": run.local.store.most,
        "val": live.val_losses,
        "val_metrics": live.metrics,
        **live.bad.summary(),
    }
    if corpus.shares is not None:
        summary["samples"] = corpus.shares(recipe.seed, run.step * recipe.train.global_batch)
    if order.place.rank == 0 and not stopped and folder is not None:
        summary["sample"] = sample(folder, recipe, corpus, device=order.place.device)
    return summary


def _moves(order: RankOrder, step: int) -> bool:
    """Whether all ranks have ended with this step to meet anew, as rank 0 has heard it: others may have heard less."""
    if order.place.world == 1:
        return order.line.moves()
    if order.place.rank == 0:
        order.store.set(f"moves/{step}", "1" if order.line.moves() else "0")
    return order.store.get(f"moves/{step}") == b"1"


def _start(order: RankOrder, corpus: Corpus) -> Live:
    recipe, plan, place = order.recipe, order.plan, order.place
    connect(place, order.store)
    recorder, fresh = order.trial.recorder(place.rank), order.resume is None
    run = build(recipe, plan, place, corpus, recorder, filled=fresh)
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
    live = _enter(order, run, corpus, state, order.resume)
    _tell_choice(live)
    if recipe.train.on_bad == "roll_back" and fresh:
        _save(live, blocking=True)  # there is something to go back to from the first step on
    return live


def _enter(order: RankOrder, run: Run, corpus: Corpus, state: Mapping[str, Any], folder: Path | None) -> Live:
    """All that a run has beside itself while it trains. state: what was kept beside tensors, in the checkpoint `folder`
    if there is one. Every rank calls it, or it hangs."""
    recipe, place = order.recipe, order.place
    if said := run_ahead(run, recipe.train):
        _note(order, said)
    feed, val = feeds(recipe, order.plan, corpus, place.device)
    bad = BadSteps(run, feed, recipe.train, order.run_dir, bool(state), partial(_note, order))
    bad.load(state.get("bad", {}))
    check = install(run, recipe.train.guard, partial(_note, order), bad.feed)
    snapshots = Snapshots(
        run, order.plan, place, order.shelf, recipe.launch.snapshot_every,
        among(order.store, place.rank, place.world), lambda text: order.line.send("note", text=text), order.abroad,
        order.store,
    )  # fmt: skip
    # All ranks must have read what is there before any writes over it.
    run.mesh.world.barrier()
    note = partial(_note, order)
    kept = {"keep": recipe.train.keep or None, "keep_every": recipe.train.keep_every}
    saver = Saver(order.run_dir, place.rank, place.world, token=f"{order.token}-{order.epoch}", **kept)
    mirror = None
    if recipe.train.mirror and place.rank == 0:
        mirror = Mirroring(place_at(recipe.train.mirror, order.run_dir), **kept)
    targets = recipe.train.global_batch * corpus.train.fetch(np.zeros(1, dtype=np.int64))[1].numel()
    with writing(order.run_dir):
        journal = Journal(_observers(order, run), targets, note)
    saved = f"{folder.parent.name}/{folder.name}" if folder is not None else ""
    bad.feed = order.trial.feed(bad.feed, run, order.epoch)  # the guard asks for more than a step is made of
    saving = Saving(saver, run.mesh.world, place.device, note, mirror)
    live = Live(
        order, run, bad.feed, bad, val, saving, journal, check, losses(state), targets, corpus, snapshots, saved, folder
    )  # fmt: skip
    live.cadence = cadence_of(recipe, order.run_dir, place.rank, order.store, live.clock, run.step)
    live.looked = run.step
    if place.rank == 0:
        with suppress(OSError):  # a full disk is no reason to end
            history.begin(order.run_dir, run.step, order.epoch > 0, ranks=place.world, plan=str(order.plan))
    return live


def _settle(live: Live, kept: Remembered) -> None:
    """End what a run has beside itself, before its ranks meet anew."""
    with suppress(OSError):
        live.journal.close()
    kept.recent = live.journal.recent()
    live.snapshots.end()
    live.feed.close()
    live.val.close()
    kept.bad = live.bad.state()


def _rejoin(order: RankOrder, rendezvous: Rendezvous, corpus: Corpus, kept: Remembered) -> Live:
    """The run among ranks that meet anew. order: of this meeting. Every rank that trains on calls it, or it hangs."""
    place, note = order.place, partial(_note, order)
    run, state, folder = regained(
        order, corpus, rendezvous, kept, note
    )  # fmt: skip
    live = _enter(order, run, corpus, state, folder)
    if place.rank == 0:  # a step that the others made and this one did not is theirs to tell
        with writing(order.run_dir):
            recent = [record for record in state.get("recent", ()) if record["step"] <= run.step]
            live.journal.catch_up(recent, last_step(order.run_dir / "metrics.jsonl"))
    return live


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
    report = replace(report, says={**report.says, **live.run.sync.told(), **live.snapshots.told()})
    _tell_choice(live)
    validates = made >= train.steps or (train.eval_every and made % train.eval_every == 0)
    live.journal.add(report, live.run.recorder.lap(), seconds, more=bool(validates))
    live.looked = made


def _tell_choice(live: Live) -> None:
    """What the policy has chosen by measuring, when it is new."""
    if (said := live.run.sync.says()) != live.said:
        live.said = said
        _note(live.order, f"codec: {said}")


def _between(live: Live, report: Report) -> None:
    """Evaluations and checkpoints that fall between this step and the next."""
    train, made = live.order.recipe.train, live.run.step
    with live.run.gate:
        announce(live, live.saver.poll())
    if report.stop or made >= train.steps:
        return
    if train.eval_every and made % train.eval_every == 0:
        _validate(live)
    if live.cadence.due(made):
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


def _save(live: Live, blocking: bool, last: bool = False) -> Path | None:
    """last: it must not fail. What fails before is told, and the run goes on to the next."""
    order, run, begun = live.order, live.run, time.perf_counter()
    with run.gate:
        live.check()  # what is kept is what all replicas agree on
        with writing(order.run_dir):
            live.journal.flush()  # a run resumed from here makes no line again that is missing
        announce(live, live.saver.settle())
        pieces = [*pieces_of(run), *kept_of(run)]
        again = min(order.recipe.train.steps, live.cadence.after(run.step))
        order.trial.reached("save")
        folder = live.saver.save(
            run.step, pieces, beside_tensors(live), blocking=blocking, last=last, again=again
        )
        announce(live, folder)
    live.clock.saved(time.perf_counter() - begun)
    if said := live.cadence.saved(run.step):
        _note(order, said)
    return folder


def _went_back(live: Live, report: Report) -> bool:
    """Put the run back before a bad step, with what it wrote of the steps since; False where there is no checkpoint."""
    with live.run.gate:
        announce(live, live.saver.settle())
        live.snapshots.settle()
        if (state := live.bad.go_back(report)) is None:
            return False
        live.snapshots.turned_back()
        live.val_losses[:] = losses(state)
        with writing(live.order.run_dir):
            live.journal.close()
            live.journal = Journal(_observers(live.order, live.run), live.targets, partial(_note, live.order))
        live.looked = live.run.step
    live.run.recorder.lap()
    return True


def _give_up(live: Live, report: Report) -> None:
    if report.finite or live.bad.tried:
        live.bad.give_up(report)
    leaves = live.feed.fetch(report.step, live.run.leaves)
    announce(live, live.saver.settle())
    error = blame(live.run, leaves, report, live.order.place.rank, live.saved)
    if error is not None:
        raise error
    live.run.mesh.world.barrier()  # the rank to blame has raised; the supervisor stops the others here


def place_of(rank: int, world: int, local_rank: int, backend: str, timeout: float) -> Place:
    """A rank's device: its own GPU under NCCL, the CPU under Gloo."""
    return Place(rank, world, of_rank(backend, local_rank), backend, timedelta(seconds=timeout))

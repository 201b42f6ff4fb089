"""A whole run on one rank: join, build, resume, loop, evaluate, save, end."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unisono.comm.device import is_apart
from unisono.comm.ways import ways
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import last_step
from unisono.parallel.play import StagePlayer
from unisono.plan.fidelity import needs_like_threads
from unisono.programs.schedules import SCHEDULES
from unisono.spec.finder import contributed
from unisono.spec.rendezvous import Paused, Rendezvous
from unisono.train.build.build import build, connect, feeds, judges_of
from unisono.train.build.continued import go_on
from unisono.train.data.dataset import Corpus
from unisono.train.live import Live, note, observers
from unisono.train.rank_order import RankOrder
from unisono.train.recovery.drain import Drain
from unisono.train.recovery.snapshots import Snapshots, among
from unisono.train.rejoin import CarriedState, hand_over, losses, rebuild
from unisono.train.sample import sample
from unisono.train.state import history
from unisono.train.state.cadence import cadence_of
from unisono.train.state.checkpoint import Saver
from unisono.train.state.pinned_choices import pin
from unisono.train.state.run_state import restore
from unisono.train.state.saving import Saving
from unisono.train.state.writing import writing
from unisono.train.step.overlap import run_ahead, unflushed
from unisono.train.step.run import Run
from unisono.train.step.train_step import next_step
from unisono.train.step.update import Report
from unisono.train.watch.bad_steps import BadSteps
from unisono.train.watch.collections import StepCollections
from unisono.train.watch.journal import Journal
from unisono.train.watch.kernels import KernelLook
from unisono.train.watch.locate_nan import odd_loss
from unisono.train.watch.module_times import ModuleTimes


def session(order: RankOrder, corpus: Corpus) -> dict[str, Any]:
    """Train to the recipe's last step, or until asked to stop; the summary is the same on every rank.

    Raises UsageError for a checkpoint that is damaged or of another model, UserCodeError when numbers go bad.
    """
    rendezvous, live = order.rendezvous, None if order.rendezvous else _start(order, corpus)
    carried = CarriedState(live.run, live.val_losses) if live is not None else CarriedState()
    try:
        while True:
            try:
                if rendezvous is not None:
                    order = order.at(rendezvous)
                    if live is not None:  # once: another rank may be lost before this one trains again
                        ending, live = live, None
                        _leave(ending, carried)
                    if order.place.rank >= order.place.world:
                        hand_over(order, rendezvous, carried)
                        return {"left": True}
                    live = _rejoin(order, rendezvous, corpus, carried)
                    carried.run, carried.val_losses, rendezvous = live.run, live.val_losses, None
                if live is None:
                    raise ValueError("a rank without a run needs a rendezvous")
                with Drain(live.drain_parts()):
                    return _play(live)
            except Exception as error:
                rendezvous = order.line.rendezvous(error)
                if rendezvous is None:
                    raise
    finally:
        if live is not None:
            if live.collections is not None:
                live.collections.close()
            live.run.sync.close()
            with suppress(OSError):  # what is under way, if anything, is the better story
                live.journal.close()


def _play(live: Live) -> dict[str, Any]:
    """The loop: steps until the last one, or until a rank is asked to stop; then the end of the run."""
    order, run = live.order, live.run
    order.line.send("ready", coords=run.mesh.at, step=run.step)
    begun, first, last, seconds = time.perf_counter(), run.step, None, 0.0
    clock = begun
    while run.step < order.last_step and not (last is not None and last.stop) and not live.enough:
        with live.look.step():
            report = next_step(run, live.feed, order.line.stop_requested, order.faults.fetched)
        if (report := live.bad.handle(report)) is None:
            continue
        if live.bad.goes_back(report) and live.go_back(report):
            clock = time.perf_counter()
            continue
        last = report
        now = time.perf_counter()
        seconds += now - clock
        _stepped(live, report, now - clock)
        clock = time.perf_counter()
    early = live.enough
    stopped = last is not None and last.stop and run.step < order.last_step and not early
    if stopped and _moves(order, run.step):
        raise Paused
    if early:
        live.note(early)
    elif not stopped:
        live.validate()
    # A run resumed at its end has nothing new to save.
    news = run.step > first or live.begun_from is None
    folder = live.save(blocking=True, last=True) if news else live.begun_from
    with writing(order.run_dir):
        live.journal.flush(must=True)
    live.saver.close(5.0 if stopped else None)  # who was asked to stop may be killed soon
    live.stop_feeds()
    live.end()
    return _summary(live, last, folder, stopped, run.step - first, seconds, time.perf_counter() - begun)


def _stepped(live: Live, report: Report, seconds: float) -> None:
    """What follows each step."""
    live.clock.stepped(seconds)
    live.tell(report, seconds)
    if report.bad and not report.skipped:
        live.give_up(report)
    live.snapshots.stepped(seconds, {"val": list(live.val_losses), "bad": live.bad.state()})
    if report.step == 0 and (text := odd_loss(live.order.recipe, live.corpus.classes, report.loss)):
        live.note(text)
    live.between(report)


def _summary(
    live: Live,
    last: Report | None,
    folder: Path | None,
    stopped: bool,
    steps: int,
    training: float,
    whole: float,
) -> dict[str, Any]:
    """What the run came to. steps: made by this start. training, whole: seconds in steps, and of all."""
    order, run, corpus = live.order, live.run, live.corpus
    summary = {
        "steps": run.step,
        "loss": last.loss if last and math.isfinite(last.loss) else None,
        "val_loss": live.val_losses[-1][1] if live.val_losses else None,
        "tokens_per_s": live.trained / training if training else 0.0,
        "seconds": whole,
        "stopped": stopped,
        "checkpoint": str(folder),
        "resident_mib": peak_rss_mib(),
        "away_bytes": run.local.store.most,
        "val": live.val_losses,
        "val_metrics": live.metrics,
        "val_gap": live.gap,
        "early_stopped": bool(live.enough) and run.step < order.recipe.train.steps,
        **live.bad.summary(),
    }
    recipe = order.recipe
    if corpus.shares is not None:
        summary["samples"] = corpus.shares(recipe.seed, live.feed.samples_before(run.step))
    if order.place.rank == 0 and (run.step >= recipe.train.steps or live.enough) and folder is not None:
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
    recorder, fresh = order.faults.recorder(place.rank), order.resume is None
    run = build(recipe, plan, place, corpus, recorder, filled=fresh)
    if place.rank == 0:
        with writing(order.run_dir):
            pin(order.run_dir, plan, run.mesh, run.sync)
    for text in _facts(order, run, corpus):
        note(order, text)
    state = restore(run, order.resume) if order.resume is not None else go_on(run, recipe, corpus)
    live = _enter(order, run, corpus, state, order.resume)
    live.tell_codec()
    if recipe.train.on_bad == "roll_back" and fresh:
        live.save(blocking=True)  # there is something to go back to from the first step on
    return live


def _facts(order: RankOrder, run: Run, corpus: Corpus) -> list[str]:
    """What a user is told of a run before it starts."""
    plan, post = order.plan, run.player.post if isinstance(run.player, StagePlayer) else None
    texts = [*ways(run.mesh, order.place.device, post.says() if post is not None else "")]
    if SCHEDULES.read(plan.schedule).measured and plan.pp > 1:
        texts.append(f"stages by measured seconds: {'/'.join(map(str, run.local.blocks))} blocks")
    if schedule := unflushed(plan):
        texts.append(schedule.loses(plan.pp, len(run.leaves)))
    threads = order.last_bits.get("threads")
    if needs_like_threads(plan) and order.recipe.launch.threads_per_rank is None and threads is not None:
        texts.append(f"same bits as one device with {threads} threads, which is what each rank has here;"
                     f" --launch.threads_per_rank {threads} keeps that number in other runs")  # fmt: skip
    return [*texts, *run.local.notes, *corpus.notes]


def _enter(order: RankOrder, run: Run, corpus: Corpus, state: Mapping[str, Any], folder: Path | None) -> Live:
    """All that a run has beside itself while it trains. state: what was kept beside tensors, in the checkpoint `folder`
    if there is one. Every rank calls it, or it hangs."""
    recipe, place, tell = order.recipe, order.place, partial(note, order)
    # Where this start ends, weights are looked at.
    if text := run_ahead(run, recipe.train.model_copy(update={"steps": order.last_step})):
        tell(text)
    _find_peers(order, run)
    run.recorder.host_clock.reference = getattr(
        order.store, "time_ns", None
    )  # torch's own stores have no time
    run.recorder.host_clock.ask()
    feed, val = feeds(recipe, order.plan, corpus, place.device, run.sync.lane, run.update.keeps)
    bad = BadSteps(run, feed, recipe.train, order.run_dir, bool(state), tell)
    bad.load(state.get("bad", {}))
    check: Callable[[], None] = lambda: None
    if recipe.train.guard:
        check = contributed("unisono.train.watch.guard").install(run, recipe.train.guard, tell, feed)
    snapshots = Snapshots(
        run, order.plan, place, order.buffer, recipe.launch.snapshot_every,
        among(order.store, place.rank, place.world), lambda text: order.line.send("note", text=text), order.replicas,
        order.store,
    )  # fmt: skip
    # All ranks must have read what is there before any writes over it.
    run.mesh.world.barrier()
    keep = {"keep": recipe.train.keep or None, "keep_every": recipe.train.keep_every}
    saver = Saver(order.run_dir, place.rank, place.world, token=f"{order.token}-{order.epoch}", **keep)
    mirror = None
    if recipe.train.mirror and place.rank == 0:
        copies = contributed("unisono.train.state.checkpoint.mirror")
        mirror = copies.Mirroring(copies.place_at(recipe.train.mirror, order.run_dir), **keep)
    saving = Saving(saver, run.mesh.world, place.device, tell, mirror)
    each = corpus.train.fetch(np.zeros(1, dtype=np.int64))[1]
    # The values of a target that is no class count once together: a sample.
    targets = recipe.train.global_batch * (1 if each.is_floating_point() else each.numel())
    with writing(order.run_dir):
        journal = Journal(observers(order, run), targets, tell)
    saved = f"{folder.parent.name}/{folder.name}" if folder is not None else ""
    live = Live(
        order, run, corpus, feed, val, bad, saving, snapshots, check, targets, journal, losses(state), folder, saved
    )  # fmt: skip
    live.look = KernelLook(not is_apart(place.device))  # elsewhere operations are only handed over
    order.faults.trains(run, order.epoch)
    live.collections = StepCollections(recipe.train.gc_every)
    live.modules = ModuleTimes(run.local.stages, run.recorder, place.device)
    live.judges = judges_of(recipe)
    live.judge_again()
    live.cadence = cadence_of(recipe, order.run_dir, place.rank, order.store, live.clock, run.step)
    live.written = run.step
    if place.rank == 0:
        with suppress(OSError):  # a full disk is no reason to end
            facts = {"ranks": place.world, "plan": str(order.plan), "data": corpus.fingerprint}
            history.begin(order.run_dir, run.step, order.epoch > 0, **facts)
    return live


def _find_peers(order: RankOrder, run: Run) -> None:
    """Go on from where other runs are, if this one trains beside some. Every rank calls it, or it hangs."""
    launch, before = order.recipe.launch, run.step
    if launch.mailbox is not None:
        note(
            order,
            f"peer {launch.peer} looks for others in the mailbox, at least {launch.peers} at the beginning",
        )
    run.step = run.sync.proceed(before)
    if run.step != before:
        note(order, f"peers are further: going on from their weights with step {run.step + 1}")


def _leave(live: Live, carried: CarriedState) -> None:
    """End what a run has beside itself, before its ranks meet anew."""
    with suppress(OSError):
        live.tell_last()
        live.journal.close()
    carried.recent = live.journal.recent()
    live.snapshots.end()
    if live.modules is not None:
        live.modules.close()
    live.stop_feeds()
    live.run.sync.close()
    carried.bad = live.bad.state()


def _rejoin(order: RankOrder, rendezvous: Rendezvous, corpus: Corpus, carried: CarriedState) -> Live:
    """The run among ranks that meet anew. order: of this meeting. Every rank that trains on calls it, or it hangs."""
    run, state, folder = rebuild(order, corpus, rendezvous, carried, partial(note, order))
    live = _enter(order, run, corpus, state, folder)
    if order.place.rank == 0:  # a step that the others made and this one did not is theirs to tell
        with writing(order.run_dir):
            recent = [record for record in state.get("recent", ()) if record["step"] <= run.step]
            live.journal.catch_up(recent, last_step(order.run_dir / "metrics.jsonl"))
    return live

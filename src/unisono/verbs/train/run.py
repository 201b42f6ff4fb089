"""`unisono train`, on the supervisor's side: start ranks, draw, and say at the end what came of it. No torch."""

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unisono.config import Recipe
from unisono.config.resolve import located
from unisono.launch import env, fork_server
from unisono.launch.background_replanner import BackgroundReplanner
from unisono.launch.context import flush_and_leave
from unisono.launch.error_record import ECHO
from unisono.launch.guardian import GuardianPipe
from unisono.launch.loop import OnEvent
from unisono.launch.outcome import Outcome
from unisono.launch.run.membership import Role
from unisono.launch.screen import Screen
from unisono.launch.signals import StartupSignals
from unisono.observe.files import write_whole
from unisono.spec import words
from unisono.spec.errors import Interrupted, PeerGone, Stopped, UnisonoError, UsageError, UserCodeError
from unisono.spec.finder import contributed
from unisono.spec.runs import has_checkpoint
from unisono.spec.settings import Settings, tell
from unisono.spec.source import SOURCES, counted_in
from unisono.train.state import history
from unisono.train.state.writing import nothing_to_resume, writing
from unisono.verbs.train import spreading
from unisono.verbs.train.folder import Watched, finished, make_run_dir, newest
from unisono.verbs.train.late_ranks import LateRanks
from unisono.verbs.train.order import TrainOrder
from unisono.verbs.train.planning import Replanner, best_for
from unisono.verbs.train.room import expected, require_room
from unisono.verify import prover

ENTRY = "unisono.verbs.train.rank:main"

_SEQUEL, _BESIDE = "unisono.programs.chaos.sequel", "unisono.verbs._beside"  # of the sister package


def run(
    order: TrainOrder, settings: Settings, origins: Mapping[str, str], early: StartupSignals, *, demo: bool = False,
    guardian: GuardianPipe = GuardianPipe(),
    hosts: str | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Train. Returns the object of `--json`; raises UnisonoError. origins: where each key was given, for errors. early:
    what hears a SIGTERM before and after the ranks do. demo: prove the plan at the end, in a line. guardian: knows of
    supervisors before this one. hosts: as `--hosts` names them."""
    recipe, place = order.recipe, env.detect(os.environ)
    if place is not None and place.role is not Role.TRAINER:
        return contributed(_BESIDE).stand(place, settings)
    order, done = _which(order, alone=place is None)
    resume = order.run_dir
    if order.chaos and place is not None:
        raise UsageError("--chaos plays faults on ranks of our own", where="unisono train", code="C30",
                         likely=f"{place.source} started these, and it restarts them as it likes",
                         fix="the same command without a starter")  # fmt: skip
    spreading.may_stand_beside(recipe, place.source if place is not None else "--hosts" if hosts else "")
    if done is not None and order.launches and resume is not None:  # all was there but the last words
        _finish(resume, recipe, done, settings)
        return done
    if done is not None:
        return _nothing_to_do(done, resume, recipe, settings) if place is None or not place.rank else None
    count, said = env.again(os.environ)
    for line in (*(env.idle(os.environ) if place is None else ()), *([said] if said else ())):
        if place is None or not place.rank:
            settings.note(f"note  {line}")
    if place is None:  # ranks that others started look together: all hear what one of them lacks
        _look(recipe, origins)  # before torch is imported: in a blink, not after seconds
        if resume is not None and order.resume and not order.auto and not has_checkpoint(resume):
            raise nothing_to_resume(str(resume))
    new = resume is None or (guardian.history.created and not guardian.history.began)
    with Watched(new, order.config_text, resume, guardian=guardian) as folder:
        if place is not None:
            summary = _as_rank(order, settings, folder, place, early)
        else:
            summary = _as_supervisor(order, settings, folder, early, demo, hosts)
        if summary.pop("over", False):
            return _nothing_to_do(summary, None, recipe, settings)
        summary["restarts"] += max(count, order.launches, history.past(Path(summary["run_dir"])).starts - 1)
        _finish(Path(summary["run_dir"]), recipe, summary, settings)
    return summary


def _which(order: TrainOrder, alone: bool) -> tuple[TrainOrder, dict[str, Any] | None]:
    """The order with the run that it goes on with, and the summary of that run if there is nothing to do. alone: no
    rank was started beside this process; else rank 0 looks for a run later, for all."""
    if order.auto and alone:
        newest_run = newest(order.recipe)
        return replace(order, run_dir=newest_run.run_dir), newest_run.done
    # A chosen checkpoint is gone on from, whatever came after it.
    looks = order.run_dir is not None and not order.checkpoint
    return order, finished(order.run_dir, order.recipe.train.steps) if looks and order.run_dir else None


def _nothing_to_do(
    done: dict[str, Any], run_dir: Path | None, recipe: Recipe, settings: Settings
) -> dict[str, Any]:
    run_dir = run_dir or done["run_dir"]
    more = f"--train.steps {2 * recipe.train.steps or 100} would go on"
    settings.note(f"nothing to do: {run_dir} has made its {done['steps']} steps; {more}")
    return done


def _look(recipe: Recipe, origins: Mapping[str, str]) -> None:
    """Look for simple mistakes in the data. Raises UsageError, with the line or flag that names the data."""
    try:
        SOURCES.read(recipe.data.source).look()
    except UsageError as error:
        error.where = located(error.where, origins)
        raise


def _as_supervisor(
    order: TrainOrder,
    settings: Settings,
    folder: Watched,
    early: StartupSignals,
    demo: bool,
    hosts: str | None,
) -> dict[str, Any]:
    """Own the ranks: one process that has torch is forked into as many as the plan takes."""
    recipe, plan = order.recipe, order.plan
    remote = (
        spreading.remote_hosts(order, hosts, settings, partial(best_for, recipe, plan, os.environ))
        if hosts
        else None
    )
    spread = spreading.with_beside(recipe, plan)
    with fork_server.start(ENTRY, len(spread.roles) or plan.world, settings.quiet) as nursery:
        folder.prediction = expected(recipe, plan, os.environ)
        require_room(folder.prediction, plan.world)
        folder.path = folder.path or make_run_dir(recipe, order.config_text, guardian=folder.guardian)
        folder.guardian.tell(run_dir=str(folder.path))
        if remote is not None:
            remote.open(recipe.launch.shell, folder.path)
        argument = replace(order, run_dir=folder.path).as_json()
        threads = recipe.launch.threads_per_rank
        sequel = contributed(_SEQUEL) if order.chaos else None
        known = folder.guardian.history
        past = sequel.began(folder.path, order.chaos, known.died, known.since) if sequel else None
        with _screen(order, settings) as screen:
            hear = _heard_by(screen, folder, past)
            recovers = recipe.launch.recover
            replans = recovers and recipe.launch.replan
            outcome = nursery.run(
                argument,
                plan.world,
                threads,
                hear,
                recipe.launch.timeout,
                recipe.launch.backend,
                recovers,
                recipe.launch.grace,
                remote=remote,
                replanner=BackgroundReplanner(Replanner(recipe, plan, os.environ)) if replans else None,
                spread=spread,
            )
        if outcome.stopped:
            early.stopping()
        _raise_if_ended(outcome, folder, settings)
        summary = _summary(outcome, order, settings)
        summary["restarts"] = folder.guardian.history.lost + outcome.losses
        if sequel and past is not None:
            summary["faults"] = sequel.summed_up(sequel.what_followed(past.lines()))
        if demo:
            summary["parity"] = prover.one_line(recipe, plan)
    return summary


def _as_rank(
    order: TrainOrder, settings: Settings, folder: Watched, place: env.Started, early: StartupSignals
) -> dict[str, Any]:
    """Be one of the ranks that torchrun or the like has started."""
    launch, argument = order.recipe.launch, order.as_json()
    folder.prediction = None if place.rank else expected(order.recipe, order.plan, os.environ)
    with _screen(order, settings) as screen:
        hear = _heard_by(screen, folder)
        ago = time.monotonic() - early.since if early.how else None
        ending = env.Ending(launch.grace, partial(_left, folder, settings, place.rank), ago)
        outcome = env.run_in_env(
            ENTRY, argument, hear, os.environ, launch.threads_per_rank, launch.backend, launch.timeout,
            partial(_hung, argument, settings, place.rank), ending,
        )  # fmt: skip
    if outcome.stopped:
        early.stopping()
    folder.path = Path(argument["run_dir"]) if argument["run_dir"] else folder.path
    folder.new = folder.new and place.rank == 0  # the rank that made it may take it away again
    if outcome.error is not None:
        # Groups are still alive, and torch's own way out of the process aborts at random then.
        atexit.register(flush_and_leave, outcome.exit)
        if outcome.error.shared and place.rank:  # rank 0 tells all of it
            _stops(place.rank, f"{outcome.error.what}, rank {outcome.error.rank}", outcome.exit)
        if outcome.error.code == "R03":
            _echo(outcome, folder, settings, place.rank)
    elif place.rank:
        flush_and_leave(outcome.exit)
    _raise_if_ended(outcome, folder, settings)
    return _summary(outcome, order, settings)


def _hung(argument: dict[str, Any], settings: Settings, rank: int, error: UnisonoError, mine: bool) -> None:
    """The end of a run that hangs: the main thread, which would tell it, is in the hang itself."""
    _tell_end(error, argument["run_dir"] if mine else None, settings.json and rank == 0)
    if mine:
        tell(error.render())


def _left(folder: Watched, settings: Settings, rank: int, error: UnisonoError) -> None:
    """The end of a rank that was asked to stop and whose main thread is in a step: rank 0 tells it."""
    if rank == 0:
        _name_the_way_on(error, folder)
        folder.__exit__(type(error), error, None)
        _tell_end(error, folder.path if folder.began else None, settings.json)
        tell(error.render())
    flush_and_leave(error.exit)


def _tell_end(error: UnisonoError, run_dir: str | Path | None, on_stdout: bool) -> None:
    """Put an error where programs look for it: `error.json`, and the object of --json."""
    if run_dir:
        with contextlib.suppress(OSError):
            write_whole(Path(run_dir, "error.json"), json.dumps(error.as_dict(), indent=2) + "\n")
    if on_stdout:
        print(json.dumps({"schema_version": 1, **error.as_dict()}), file=sys.__stdout__, flush=True)


def _stops(rank: int, what: str, code: int) -> NoReturn:
    tell(f"rank {rank} stops: {what}")
    flush_and_leave(code)


def _echo(outcome: Outcome, folder: Watched, settings: Settings, rank: int) -> None:
    """Leave because of another rank's error, which that rank tells; one object on stdout is still rank 0's duty."""
    named = outcome.error if isinstance(outcome.error, PeerGone) else None
    what = named.what if named else "another rank has gone, and its error is the one to read"
    if rank or not settings.json:
        _stops(rank, what, outcome.exit)
    if folder.path is not None and (folder.path / "error.json").exists():
        folder.path = None
    raise named or UserCodeError(what, likely=ECHO, rank=rank, code="R03")


def _heard_by(screen: Screen, folder: Watched, past: Any = None) -> OnEvent:
    """Return what hears the ranks. past: the log of faults that are played."""
    late: list[LateRanks] = []

    def hear(rank: int, event: dict[str, Any]) -> None:
        if past is not None and event["kind"] == "members" and "lost" in event:
            past.add("detected", epoch=event["epoch"], lost=event["lost"], born=event["born"])
        folder.hear(rank, event)
        screen.event(rank, event)
        if event["kind"] == "step" and rank == 0 and folder.path is not None:
            if not late:
                late.append(LateRanks(folder.path))
            for text in late[0].news():
                screen.event(-1, {"kind": "note", "text": text})

    return hear


def _screen(order: TrainOrder, settings: Settings) -> Screen:
    title = f"{order.recipe.name}: {order.plan}"
    recipe = order.recipe
    unit = counted_in(recipe.data.source)
    return Screen(order.plan.world, recipe.train.steps, title, settings.quiet, settings.color, unit=unit)


def _raise_if_ended(outcome: Outcome, folder: Watched, settings: Settings) -> None:
    """Raise the error of a rank, or the one of a run that was asked to stop."""
    error, again = outcome.error, f"unisono train --resume {folder.path}"
    if error is not None:
        if isinstance(error, (Interrupted, Stopped)):
            _name_the_way_on(error, folder)
        elif kept := _kept(folder):
            settings.note(f"kept    {kept}: {again}")
        raise error
    result = outcome.results[0]
    if outcome.stopped and (result is None or result["stopped"]):
        kind = Interrupted if outcome.stopped == "interrupt" else Stopped
        if result is None:
            raise kind("stopped as asked, before the first step")
        raise kind("stopped as asked; the run is saved", fix=again)


def _name_the_way_on(error: UnisonoError, folder: Watched) -> None:
    """Add to an error how the stopped run is resumed."""
    if kept := _kept(folder):
        error.fix = f"unisono train --resume {folder.path} (from {kept})"
    elif folder.began and isinstance(error, Stopped):
        error.likely = "there is no checkpoint yet: a new start begins at the first step"


def _kept(folder: Watched) -> str:
    """The checkpoint that a run which has begun would go on from, as its `latest` names it."""
    try:
        named = (folder.path / "latest").read_text(errors="replace") if folder.began and folder.path else ""
        return named.strip()
    except OSError:
        return ""


def _summary(outcome: Outcome, order: TrainOrder, settings: Settings) -> dict[str, Any]:
    result, plan = dict(outcome.results[0] or {}), order.plan
    return {
        "run_dir": result.pop("run_dir"),
        "name": order.recipe.name,
        "plan": str(plan),
        "ranks": plan.world,
        "restarts": 0,
        "timetable": {"schedule": plan.schedule, "ranks": plan.pp, "micros": plan.micros},
        "command": settings.command,
        **result,
    }


def _finish(run_dir: Path, recipe: Recipe, summary: dict[str, Any], settings: Settings) -> None:
    """summary.json, the report, and the closing lines on stderr."""
    with writing(run_dir):
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=1))
        if recipe.out.report:
            from unisono.report import page
            from unisono.verbs._prices import prices_of

            summary.update(page.run(run_dir, prices_of(run_dir, os.environ)))
    for line in closing(summary, counted_in(recipe.data.source), squares=recipe.model.draws):
        settings.note(line)


def closing(summary: dict[str, Any], unit: str = "tokens", squares: bool = False) -> list[str]:
    """The last lines of a run for a person. unit: what its speed counts, tokens or samples. squares: its loss is a
    squared error."""
    loss = "" if summary["loss"] is None else f"loss {summary['loss']:.4f}   "
    what = "squared error" if squares else f"nats per {unit[:-1]}"
    val = "" if summary["val_loss"] is None else f"validation {summary['val_loss']:.4f} {what}   "
    lines = [f"done    {loss}{val}{summary['tokens_per_s']:,.0f} {unit}/s   saved {summary['checkpoint']}"]
    if metrics := summary.get("val_metrics"):
        lines.append("metrics " + "   ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    lines += _of_bad_steps(summary)
    if summary.get("away_bytes"):
        away, resident = summary["away_bytes"], summary["resident_mib"] * 2**20
        lines.append(
            f"memory  {words.nbytes(away)} of rank 0 put away, at most; {words.nbytes(resident)} resident"
        )
    if faults := summary.get("faults"):
        lines.append(f"faults  {contributed(_SEQUEL).in_words(faults)}")
    text = summary.get("sample") or ""
    strange = text.count("\N{REPLACEMENT CHARACTER}") / max(1, len(text))
    if strange > 0.25:
        lines.append(
            f"sample  no text yet: {words.percent(strange)} of its characters are bytes that no text has"
        )
    elif text:
        clean = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
        first, *rest = clean.splitlines()[:8]
        lines += [f"sample  {first}", *(f"        {line}" for line in rest)]
    if summary.get("parity"):
        lines.append(f"verify  {summary['parity']}")
    if summary.get("report_html"):
        lines.append(f"report  {summary['report_html']}  (and report.png)")
        lines.append(f"        {summary['verdict']}")
    return lines


def _of_bad_steps(summary: dict[str, Any]) -> list[str]:
    skipped, returns = summary.get("skipped") or (), summary.get("rolled_back") or ()
    numbers = [str(record["step"]) for record in skipped]
    texts = [
        f"went back to step {record['to']}: step {record['step']}, {record['reason']}" for record in returns
    ]
    if numbers:
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        texts.append(f"skipped the updates of steps {', '.join(numbers[:8])}{more}")
    return [f"bad     {text}" for text in texts]

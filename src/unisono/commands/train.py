"""`unisono train`, on the side that watches: start ranks, draw, and say at the end what came of it. No torch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono.commands import proof
from unisono.commands.run_folder import make_run_dir
from unisono.config import Recipe
from unisono.launch import env, local
from unisono.launch.context import flush_and_leave
from unisono.launch.screen import Screen
from unisono.launch.supervise import Outcome
from unisono.observe.files import write_whole
from unisono.plan import Plan
from unisono.spec.errors import Interrupted, Stopped

ENTRY = "unisono.commands.train_rank:main"


def run(recipe: Recipe, plan: Plan, origins: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """Train a resolved recipe under a resolved plan. Returns the object of `--json`; raises UnisonoError."""
    argument = {
        "recipe": recipe.model_dump_json(exclude_unset=True),
        "plan": str(plan),
        "run_dir": options.get("resume"),
        "resume": bool(options.get("resume")),
        "config_text": options.get("config_text", ""),
    }
    if env.detect(os.environ) is not None:
        return _as_rank(recipe, plan, argument, options)
    return _as_watcher(recipe, plan, argument, options)


def _as_watcher(
    recipe: Recipe, plan: Plan, argument: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Own the ranks: one process that has torch is forked into as many as the plan takes."""
    with local.start(ENTRY, plan.world, options["quiet"]) as nursery:
        run_dir = Path(argument["run_dir"] or make_run_dir(recipe, argument["config_text"]))
        argument["run_dir"] = options["run_dir"] = str(run_dir)
        screen = _screen(recipe, plan, options)
        threads = recipe.launch.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // plan.world)
        with screen:
            outcome = nursery.run(
                argument, plan.world, threads, screen.event, recipe.launch.timeout, recipe.launch.backend
            )
        _raise_if_ended(outcome, run_dir)
        summary = _summary(outcome, recipe, plan, options)
        if options.get("demo"):
            summary["parity"] = proof.one_line(recipe, plan)
    _finish(run_dir, recipe, summary, options)
    return summary


def _as_rank(recipe: Recipe, plan: Plan, argument: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Be one of the ranks that torchrun or the like has started."""
    screen = _screen(recipe, plan, options)
    place = env.detect(os.environ)
    first = place is not None and place.rank == 0
    threads = recipe.launch.threads_per_rank
    with screen:
        outcome = env.run_in_env(
            ENTRY, argument, screen.event, os.environ, threads, recipe.launch.backend, recipe.launch.timeout
        )
    if not first:
        if outcome.error is not None and outcome.trace:
            print(outcome.trace, file=sys.stderr)
        if outcome.error is not None:
            print(outcome.error.render(), file=sys.stderr)
        flush_and_leave(outcome.exit)
    result = outcome.results[0]
    run_dir = Path(result["run_dir"]) if result else None
    if run_dir is not None:
        options["run_dir"] = str(run_dir)
    _raise_if_ended(outcome, run_dir)
    summary = _summary(outcome, recipe, plan, options)
    if run_dir is not None:
        _finish(run_dir, recipe, summary, options)
    return summary


def _screen(recipe: Recipe, plan: Plan, options: dict[str, Any]) -> Screen:
    title = f"{recipe.name}: {plan}"
    return Screen(plan.world, recipe.train.steps, title, options["quiet"], options["color"])


def _raise_if_ended(outcome: Outcome, run_dir: Path | None) -> None:
    """The errors of ranks, and the wish to stop, as the errors that the command line maps to exit codes."""
    if outcome.error is not None:
        if outcome.trace:
            print(outcome.trace.rstrip(), file=sys.stderr)
        raise outcome.error
    if outcome.stopped:
        again = f"unisono train --resume {run_dir}"
        kind = Interrupted if outcome.stopped == "interrupt" else Stopped
        raise kind("stopped as asked; the run is saved", fix=again)


def _summary(outcome: Outcome, recipe: Recipe, plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    result = dict(outcome.results[0] or {})
    return {
        "run_dir": result.pop("run_dir"),
        "name": recipe.name,
        "plan": str(plan),
        "ranks": plan.world,
        "restarts": 0,
        "timetable": {"schedule": plan.schedule, "ranks": plan.pp, "micros": plan.micros},
        "command": " ".join(options.get("command", [])),
        **result,
    }


def _finish(run_dir: Path, recipe: Recipe, summary: dict[str, Any], options: dict[str, Any]) -> None:
    """summary.json, the report, and the closing lines on stderr."""
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1))
    if recipe.out.report:
        from unisono.report import command as report

        summary.update(report.run(run_dir, {"json": True, "quiet": True, "color": False}))
    if options["quiet"]:
        return
    for line in closing(summary):
        print(line, file=sys.stderr)


def closing(summary: dict[str, Any]) -> list[str]:
    """The last lines of a run for a person."""
    loss = "" if summary["loss"] is None else f"loss {summary['loss']:.4f}   "
    val = "" if summary["val_loss"] is None else f"validation {summary['val_loss']:.4f} nats   "
    lines = [f"done    {loss}{val}{summary['tokens_per_s']:,.0f} targets/s   saved {summary['checkpoint']}"]
    if summary.get("sample"):
        lines += [
            "sample  " + line if i == 0 else "        " + line
            for i, line in enumerate(_lines(summary["sample"]))
        ]
    if summary.get("parity"):
        lines.append(f"verify  {summary['parity']}")
    if summary.get("report_html"):
        lines.append(f"report  {summary['report_html']}  (and report.png)")
        lines.append(f"        {summary['verdict']}")
    return lines


def _lines(text: str, most: int = 8) -> list[str]:
    clean = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    return clean.splitlines()[:most]

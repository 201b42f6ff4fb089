"""`unisono runs [FOLDER]`."""

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.spec.errors import UsageError
from unisono.spec.runs import CHECKPOINTS
from unisono.spec.words import nbytes, number
from unisono.verbs import CommandCall, Parser, Result, Verb
from unisono_contrib.verbs.compare import CompareVerb

if TYPE_CHECKING:
    from unisono_contrib.report.catalogue import RunEntry


class RunsVerb(Verb):
    """List runs with what each was made of; filter, compare and prune them.

    Each run has its plan, the commit of the code, the fingerprint of its data, and the run from which its weights came.
    --prune shows what would go; with --yes it goes. A run that trains, or that another one came from, stays.
    """

    name = "runs"
    epilog = (
        'unisono runs --state done --metric "val_loss<1.5" --sort val_loss\n'
        'unisono runs --plan "dp=2" --compare\n'
        "unisono runs runs/lr --sort val_loss --keep 3 --prune checkpoints --yes"
    )

    def flags(self, parser: Parser) -> None:
        parser.add_argument(
            "folder", nargs="?", default="runs", metavar="FOLDER", help="where to look (runs)"
        )
        parser.add_argument("--name", default="", metavar="GLOB", help="runs of this name, as trial-*")
        parser.add_argument(
            "--plan", default="", metavar="WORDS", help='runs whose plan has these words: "dp=2"'
        )
        parser.add_argument("--state", default="", metavar="S,S", help="running, done, stopped, failed, lost")
        parser.add_argument("--parent", default="", metavar="RUN", help="runs that came from this one")
        parser.add_argument(
            "--commit", default="", metavar="HASH", help="runs of this commit, or its first letters"
        )
        parser.add_argument("--data", default="", metavar="HASH", help="runs on data of this fingerprint")
        parser.add_argument("--metric", action="append", default=[], metavar="M<X", help='as "val_loss<1.5"')
        parser.add_argument(
            "--sort", default="began", metavar="KEY", help="began, size or a metric, the least first"
        )
        parser.add_argument("--reverse", action="store_true", help="the greatest first")
        parser.add_argument("--compare", action="store_true", help="draw these runs beside each other")
        parser.add_argument("--out", metavar="FILE", help="with --compare: where to draw them")
        parser.add_argument(
            "--prune", nargs="?", const="runs", choices=("runs", CHECKPOINTS),
            help="what would go: whole runs, or their checkpoints alone",
        )  # fmt: skip
        parser.add_argument("--keep", type=int, default=0, metavar="N", help="with --prune: the first N stay")
        parser.add_argument("--yes", action="store_true", help="with --prune: do it")
        parser.add_argument(
            "--force", action="store_true", help="with --prune: also what other runs came from"
        )

    def run(self, call: CommandCall) -> Result:
        from unisono_contrib.report import catalogue

        args = call.args
        states = tuple(filter(None, args.state.split(",")))
        for state in states:
            if state not in catalogue.STATES:
                raise UsageError(f"no run has the state {state!r}", where="--state",
                                 fix=f"one of: {' '.join(catalogue.STATES)}", code="C04")  # fmt: skip
        wanted = catalogue.RunFilter(
            args.name,
            args.plan,
            states,
            args.parent,
            args.commit,
            args.data,
            tuple(map(catalogue.bound, args.metric)),
        )
        every = catalogue.entries(Path(args.folder))
        runs = _sorted([run for run in every if wanted(run)], args.sort, args.reverse)
        if args.compare:
            compared = Namespace(runs=[str(run.folder) for run in runs], out=args.out)
            return CompareVerb().run(replace(call, args=compared))
        for line in _table(runs):
            call.settings.say(line)
        result = {"folder": args.folder, "runs": [run.as_json() for run in runs]}
        return result if args.prune is None else {**result, **_prune(call, runs, every)}


def _sorted(runs: Sequence["RunEntry"], key: str, reverse: bool) -> list["RunEntry"]:
    """By a number of each; runs without it are last."""
    if key not in ("began", "size") and runs and not any(key in run.metrics for run in runs):
        known = sorted({name for run in runs for name in run.metrics})
        raise UsageError(f"no run has a metric {key}", where="--sort", fix=f"began, size, {', '.join(known)}",
                         code="C04")  # fmt: skip
    values = {
        run.folder: run.metrics.get(key, {"began": run.began, "size": run.nbytes}.get(key)) for run in runs
    }
    have = sorted(
        (run for run in runs if values[run.folder] is not None), key=lambda run: values[run.folder] or 0.0
    )
    return [*(reversed(have) if reverse else have), *(run for run in runs if values[run.folder] is None)]


def _table(runs: Sequence["RunEntry"]) -> list[str]:
    from unisono.planner.formatting import Column, table

    rows = [
        {
            "run": str(run.folder), "state": run.state, "step": f"{run.step}/{run.steps}",
            "val_loss": run.metrics.get("val_loss"), "size": nbytes(run.nbytes), "data": run.data[:8],
            "commit": run.commit[:8] + "+" * run.changed, "parent": "/".join(run.parent) if run.parent else None,
            "plan": run.plan,
        }
        for run in runs
    ]  # fmt: skip
    heads = ("run", "state", "step", "val_loss", "size", "data", "commit", "parent", "plan")
    said = {"val_loss": number}
    return table([Column(head, head, said.get(head, str)) for head in heads], rows) if rows else ["no run"]


def _prune(call: CommandCall, runs: Sequence["RunEntry"], every: Sequence["RunEntry"]) -> dict[str, object]:
    """Take runs away, or say which would go; what stays has its reason."""
    args = call.args
    goes, stays = _leaving(runs[args.keep :], every, args.force)
    does = args.yes and not call.settings.dry_run
    for run in goes:
        call.settings.say(f"{'pruned' if does else 'would prune'}  {run.folder}  {nbytes(run.nbytes)}")
        if does:
            _take_away(run.folder, args.prune == CHECKPOINTS)
    for run, why in stays:
        call.settings.say(f"stays  {run.folder}: {why}")
    if goes and not does:
        call.settings.note("note  nothing was pruned; the same with --yes does it")
    return {
        "pruned": [str(run.folder) for run in goes], "did": does, "nbytes": sum(run.nbytes for run in goes),
        "stays": [{"folder": str(run.folder), "why": why} for run, why in stays],
    }  # fmt: skip


def _leaving(
    runs: Sequence["RunEntry"], every: Sequence["RunEntry"], force: bool
) -> tuple[list["RunEntry"], list[tuple["RunEntry", str]]]:
    """(runs that can go, those that stay and why). A parent goes with all that came from it, or stays."""
    from unisono_contrib.report.catalogue import is_locked, parents

    children, goes = parents(every), [*runs]
    stays = list[tuple["RunEntry", str]]()
    while True:
        names = {run.folder.name for run in goes}
        for run in goes:
            left = [child for child in children.get(run.folder.name, ()) if child.folder.name not in names]
            why = "it trains" if is_locked(run.folder) else f"{left[0].folder} came from it" if left else ""
            if why and not (force and not is_locked(run.folder)):
                stays.append((run, why))
                goes.remove(run)
                break
        else:
            return goes, stays


def _take_away(folder: Path, checkpoints: bool) -> None:
    """Remove a run, or its weights alone; and the name of it that its neighbours have as the latest."""
    if checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        (folder / "latest").unlink(missing_ok=True)
        return
    shutil.rmtree(folder)
    latest = folder.parent / "latest"
    if latest.is_symlink() or (
        latest.is_file() and latest.read_text(errors="replace").strip() == folder.name
    ):
        latest.unlink()
    with contextlib.suppress(OSError):  # others lie beside it
        folder.parent.rmdir()

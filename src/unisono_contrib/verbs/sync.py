"""`unisono sync RUN --to TRACKER`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.runs import CONFIG, run_folder
from unisono.verbs import CommandCall, Parser, Result, Verb

if TYPE_CHECKING:
    from unisono_contrib.trackers import Tracker

_FOREVER = 1e9  # seconds


class TrackerBehind(UnisonoError):
    """A tracker has not got all of a run."""

    exit = 1
    default_code = "O04"


class SyncVerb(Verb):
    """Bring trackers up to date from a run folder: what they have not got is sent, nothing twice.

    Without --to those that the run's recipe names in out.track, with their options there.
    """

    name = "sync"
    epilog = "unisono sync runs/demo/latest --to mlflow:uri=http://localhost:5000"

    def flags(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="run folder, runs/NAME or runs/NAME/ID")
        parser.add_argument(
            "--to",
            action="append",
            metavar="TRACKER",
            help="mlflow, tensorboard, trackio, wandb; with options",
        )
        parser.add_argument(
            "--patience", type=float, default=60.0, metavar="S",
            help="seconds in which a tracker has to take all of it (60)",
        )  # fmt: skip

    def run(self, call: CommandCall) -> Result:
        folder = run_folder(call.args.run)
        trackers = list(_trackers(folder, call.args.to or []))
        if not trackers:
            raise UsageError("nothing says which tracker", where="unisono sync",
                             likely="the run's recipe has none in out.track", fix=f"unisono sync {folder} --to mlflow",
                             code="C04")  # fmt: skip
        if call.settings.dry_run:
            names = [tracker.text() for tracker in trackers]
            return call.would(
                {"run_dir": str(folder), "to": names}, f"would send {folder} to {', '.join(names)}"
            )
        for tracker in trackers:
            tracker.require()
        ends = {tracker.name: _sent(call, tracker, folder) for tracker in trackers}
        for name, end in ends.items():
            if end["error"]:
                raise TrackerBehind(
                    f"{name} has {end['sent']} of {end['steps']} steps: {end['error']}", where=str(folder),
                    likely="the tracker is not there, refuses, or its disk is full",
                    fix=f"when it answers again: unisono sync {folder} --to {name}",
                )  # fmt: skip
        return {"run_dir": str(folder), "to": ends}


def _trackers(folder: Path, texts: list[str]) -> "Iterator[Tracker]":
    """Those that are meant, with the options of the run's recipe where none are said. Raises UsageError."""
    from unisono.spec.sink import SINKS
    from unisono_contrib.report.catalogue import toml_of_run
    from unisono_contrib.trackers import Tracker

    out = toml_of_run(folder / CONFIG).get("out", {})
    kept = [SINKS.read(text) for text in out.get("track", [])] if isinstance(out, dict) else []
    of_recipe = {tracker.name: tracker for tracker in kept if isinstance(tracker, Tracker)}
    for text in texts:
        tracker = of_recipe.get(text) or SINKS.read(text, "--to")
        if not isinstance(tracker, Tracker):
            raise UsageError(f"{text} is a sink, not a tracker: it stands in the run folder", where="--to",
                             fix="--to mlflow, tensorboard, trackio or wandb", code="C04")  # fmt: skip
        yield tracker
    if not texts:
        yield from of_recipe.values()


def _sent(call: CommandCall, tracker: "Tracker", folder: Path) -> dict[str, Any]:
    """Send it, by the process that follows a run; what it says at its end."""
    from unisono_contrib.trackers import follower

    patience = call.args.patience
    process = follower.start(tracker, folder, patience=_FOREVER, grace=patience)
    try:
        process.finish()
        if not process.wait(patience + 5.0):
            process.end = {"sent": 0, "steps": 0, "error": f"no answer for {patience:g} s"}
    finally:
        process.kill()
    end = process.end or {"sent": 0, "steps": 0, "error": f"its process failed; {folder}/trackers says more"}
    if not end["error"]:
        call.settings.say(f"{tracker.name}  {end['sent']} steps")
    return end

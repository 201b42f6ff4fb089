"""The folder of a run, runs/NAME/ID, from the supervisor's side: what is in it depends on how far the run came, and
what a supervisor that takes a killed one's place does with it."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unisono.config import Recipe
from unisono.launch import env, inspect_folder
from unisono.launch.guardian import GuardianPipe, guarded, may_guard
from unisono.observe import environment
from unisono.observe.files import write_whole
from unisono.spec.doubtful import toml_of
from unisono.spec.errors import Interrupted, Stopped, UsageError
from unisono.spec.runs import CHECKPOINTS, CONFIG, has_checkpoint
from unisono.spec.settings import Settings
from unisono.train.state import history
from unisono.train.state.writing import writing
from unisono.verbs.train.log import RunLog
from unisono.verbs.train.order import TrainOrder

PREDICTION = "prediction.json"
MADE = "env.json"
"""The last file that is put into a new folder."""
_NOTHING_RAN = (UsageError, Interrupted, Stopped, KeyboardInterrupt)


def make_run_dir(recipe: Recipe, config_text: str, guardian: GuardianPipe = GuardianPipe()) -> Path:
    """Make the folder of a new run, with `config.resolved.toml` and `env.json`. Raises UsageError O01 if it cannot.
    guardian: hears of it before it is there."""
    parent = Path(recipe.out.dir) / recipe.name
    run_dir = parent / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    guardian.tell(run_dir=str(run_dir), created=True)
    try:
        with writing(run_dir):
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            run_dir.mkdir(
                mode=0o700
            )  # weights and commands are their owner's, until the owner says otherwise
            write_whole(run_dir / CONFIG, config_text)
            environment.write(run_dir / MADE, os.environ)
    except BaseException:  # Ctrl-C too
        unmake(run_dir)
        raise
    return run_dir


def unmake(run_dir: Path) -> None:
    """Take away the folder of a run that never began, and its parent if nothing else is in there."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        run_dir.parent.rmdir()


@dataclass(slots=True)
class Watched:
    """A run folder while its run goes on; a context manager around the run.

    A mistake that is found before the first step leaves no new folder behind, and nothing new in an old one. From then
    on an error that ends the run names the folder (`run_dir`), where the command line puts `error.json`. prediction:
    the text of `prediction.json`, None where there is none; one from an earlier beginning goes. guardian: hears how far
    the run is, should this supervisor be killed.
    """

    new: bool
    config_text: str
    path: Path | None = None
    prediction: str | None = None
    began: bool = False
    guardian: GuardianPipe = field(default_factory=GuardianPipe)
    farthest: int = 0
    log: RunLog = field(default_factory=RunLog)

    def hear(self, rank: int, event: dict[str, Any]) -> None:
        """Take in what a rank reports, or as -1 the run. Raises UsageError O01."""
        self.log.hear(rank, event, self.path if self.began else None)
        if event.get("kind") == "folder":
            self.path, self.new = Path(event["path"]), event["new"]
        elif event.get("kind") == "ready" and self.path is not None and not self.began:
            self.began = True
            self.guardian.tell(began=True)
            self._begin(self.path)
        elif event.get("kind") == "step" and event["step"] > self.farthest:
            self.farthest = event["step"]
            self.guardian.tell(step=self.farthest)
        elif event.get("kind") == "members" and self.path is not None:
            self.guardian.tell(lost=int("lost" in event))
            with contextlib.suppress(OSError):
                history.changed(self.path, event)
        elif event.get("kind") == "saved" and self.path is not None:
            self.guardian.tell(saved=True)
            newest, name = self.path.parent / "latest", self.path.name + "\n"
            with writing(self.path):  # not before: what it names can be gone on from
                if not newest.is_file() or newest.read_bytes() != name.encode():
                    write_whole(newest, name)

    def _begin(self, path: Path) -> None:
        with writing(path):
            (path / "error.json").unlink(missing_ok=True)  # of the end before this beginning
            if not self.new:
                if _differ(path / CONFIG, self.config_text):
                    write_whole(path / CONFIG, self.config_text)
                _note_code(path)
            (path / PREDICTION).unlink(missing_ok=True)
            if self.prediction is not None:
                write_whole(path / PREDICTION, self.prediction)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        ran = self.began or (error is not None and not isinstance(error, _NOTHING_RAN))
        self.log.close(self.path if ran else None)
        if self.path is not None:  # what ranks that did not end by themselves have left there
            inspect_folder.sweep(self.path / inspect_folder.ALIVE)
        if error is None or self.path is None:
            return
        if self.began:  # its ranks have gone: what one of them was saving will not be finished
            for half in (self.path / CHECKPOINTS).glob("step-*.tmp-*"):
                shutil.rmtree(half, ignore_errors=True)
        if ran:
            error.run_dir = self.path  # pyright: ignore[reportAttributeAccessIssue]
        elif self.new:
            unmake(self.path)


def _note_code(path: Path) -> None:
    """Note in the run's history that it goes on with another commit than the one that it was begun with."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        begun, now = (
            json.loads((path / MADE).read_text(encoding="utf-8")).get("git"),
            environment.git_commit(),
        )
        if now is not None and now != begun:
            history.note(path, "code", git=now)


def _differ(path: Path, text: str) -> bool:
    """Whether two resolved recipes have different values; their origins do not count."""
    try:
        return toml_of(path.read_text(encoding="utf-8")) != toml_of(text)
    except (OSError, ValueError, RecursionError):
        return True


def finished(run_dir: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has made `steps` steps and has the checkpoint of the last; None if it has not."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    done = isinstance(summary, dict) and isinstance(summary.get("steps"), int) and summary["steps"] >= steps
    if not done or ("checkpoint" in summary and not _whole(run_dir, str(summary["checkpoint"]))):
        return None
    return summary


def _whole(run_dir: Path, path: str) -> bool:
    """Whether a checkpoint's files have the lengths that its manifest says; what is in them is read on going on."""
    checkpoint = run_dir / "checkpoints" / Path(path).name
    try:
        files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        return all((checkpoint / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class Newest:
    """run_dir: the run to go on with, None for a new one. done: the summary of one that has made all its steps.
    resumes: whether it goes on from a checkpoint."""

    run_dir: Path | None = None
    done: dict[str, Any] | None = None
    resumes: bool = False

    def as_json(self) -> dict[str, Any]:
        """The JSON object that rank 0 sends."""
        return asdict(self) | {"run_dir": str(self.run_dir) if self.run_dir is not None else None}

    @classmethod
    def of(cls, json: dict[str, Any]) -> "Newest":
        """What `as_json` made."""
        return cls(Path(json["run_dir"]) if json["run_dir"] else None, json["done"], json["resumes"])


def newest(recipe: Recipe) -> Newest:
    """The newest run of the recipe's name, if it is not finished; one behind it where that alone has a checkpoint. What
    lies behind a finished run is left alone: its command was another."""
    open_: list[Path] = []
    for run in _by_age(Path(recipe.out.dir) / recipe.name):
        if (done := finished(run, recipe.train.steps)) is not None:
            if not open_:
                return Newest(run, done)
            break
        open_.append(run)
    return Newest(next((run for run in open_ if has_checkpoint(run)), open_[0] if open_ else None))


def _by_age(parent: Path) -> list[Path]:
    """Run folders, the newest first: by the time in their names, then by when they were made."""
    runs = [path for path in parent.glob("*") if (path / CONFIG).is_file()]
    return sorted(runs, key=lambda run: (run.name[:15], _written(run)), reverse=True)


def _written(run: Path) -> float:
    try:
        return (run / MADE).stat().st_mtime  # which nobody writes again
    except OSError:
        return 0.0


def guardian_of(order: TrainOrder, settings: Settings, environ: Mapping[str, str]) -> GuardianPipe:
    """What a supervisor knows at its beginning. Where lost ranks are replaced it has a guardian, and is another process
    than the caller; ranks that others started have none."""
    owns = order.recipe.launch.recover and settings.is_program and may_guard()
    return guarded(settings.note) if owns and env.detect(environ) is None else GuardianPipe()


def order_again(order: TrainOrder, guardian: GuardianPipe) -> TrainOrder:
    """The order of a supervisor that goes on with the run of one that was killed: from the newest checkpoint or, where
    there is none, from the beginning in the same folder."""
    known = guardian.history
    if not known.launches:
        return order
    order = replace(order, launches=known.launches)
    if not known.run_dir:
        return order
    run_dir = Path(known.run_dir)
    if known.created and not (run_dir / MADE).is_file():  # killed while it was made
        unmake(run_dir)
        return order
    with contextlib.suppress(OSError):
        history.note(run_dir, "lost", at=known.at, whole=True, lost={"supervisor": known.died})
    checkpoint = "" if known.saved else order.checkpoint
    resume = order.resume or has_checkpoint(run_dir)
    return replace(order, run_dir=run_dir, resume=resume, checkpoint=checkpoint, auto=False)

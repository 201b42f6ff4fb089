"""Which run folder a path means. Standard library only."""

import contextlib
import os
from difflib import get_close_matches
from pathlib import Path

from unisono.spec.errors import UsageError

CHECKPOINTS = "checkpoints"
BEST = "best"  # in that folder: a file of one line, the checkpoint of the best validation
CONFIG = "config.resolved.toml"
HISTORY = "history.jsonl"  # of the run: starts, losses, meetings, ends
PARENT = "parent.json"  # the checkpoint of another run from which it began, where there is one
PROOF = "proof.json"  # what `unisono verify RUN` found last
LOG = "log.jsonl"  # what ranks printed and what was noted, while it ran
FIXED = ("seed", "model", "data", "train.global_batch", "train.optimizer", "train.dtype")
"""Keys of a recipe that must be as they were when a run goes on; the others may change."""
_MARKS = (CONFIG, "metrics.jsonl", "events", "summary.json", "env.json", "trace")


def run_folder(path: str | Path) -> Path:
    """The run folder meant by `path`: itself, what its `latest` names, or the newest run at most two folders below.

    Raises UsageError C03.
    """
    folder = Path(path)
    if folder.parent.name == CHECKPOINTS and _is_run(folder.parents[1]):
        raise UsageError(
            f"{path} is a checkpoint, not a run",
            where=str(path),
            fix=f"the run's folder: {folder.parents[1]}",
            code="C03",
        )
    if folder.is_file():
        raise UsageError(
            f"{path} is a file, not the folder of a run",
            where=str(path),
            fix=f"unisono train {path} makes a run; then runs/NAME, or runs/NAME/ID",
            code="C03",
        )
    if not folder.is_dir():
        near = get_close_matches(folder.name, _folders(folder.parent), n=1, cutoff=0.5)
        fix = f"did you mean {folder.with_name(near[0])}?" if near else "name a folder like runs/NAME/ID"
        raise UsageError(f"no such run folder: {path}", where=str(path), fix=fix, code="C03")
    if _is_run(folder):
        return folder
    latest = folder / "latest"  # a link, or a file that holds a name
    with contextlib.suppress(OSError, ValueError):  # ValueError: it holds no text
        named = latest.resolve() if latest.is_dir() else folder / latest.read_text(encoding="utf-8").strip()
        if named.is_dir() and _is_run(named):
            return named
    below = [run for depth in ("*", "*/*") for run in folder.glob(depth) if run.is_dir() and _is_run(run)]
    if not below:
        raise UsageError(
            f"{path} holds no run: there is no {CONFIG}",
            where=str(path),
            fix="name a folder like runs/NAME/ID",
            code="C03",
        )
    return max(below, key=lambda run: run.stat().st_mtime)


def has_checkpoint(run: Path) -> bool:
    """Whether a run has one to go on from, whole or not."""
    return any((run / CHECKPOINTS).glob("step-*/manifest.json"))


def newest_saved(folder: Path, before: str = "~") -> Path | None:
    """Of the runs in a folder such as `runs/NAME` the newest that has a checkpoint; None where none has. Their names
    begin with the time. before: only runs whose names come before this one."""
    runs = (path.parent for path in folder.glob(f"*/{CHECKPOINTS}") if not path.parent.is_symlink())
    return max((run for run in runs if run.name < before and has_checkpoint(run)), default=None)


def run_around(path: Path) -> Path | None:
    """The run folder in which a path lies, by its name or by where a link leads; None where it lies in none."""
    marks = (CHECKPOINTS, *_MARKS)
    for place in (*path.absolute().parents, *Path(os.path.realpath(path)).parents):
        if (place / CONFIG).exists() and sum((place / mark).exists() for mark in marks) > 1:
            return place
    return None


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS)


def _folders(parent: Path) -> list[str]:
    try:
        return [p.name for p in parent.iterdir() if p.is_dir()]
    except OSError:
        return []

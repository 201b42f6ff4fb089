"""The errors of checkpoints: K01 damaged · K02 not written · K03 does not fit · K04 the caller's cut is wrong."""

import errno
import shutil
from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint.find import FOLDER, newest_whole, step_of
from unisono.train.state.checkpoint.tensorfile import Damage

UNTOUCHED = "; older checkpoints are untouched"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


def damaged(folder: Path, damage: Damage) -> UsageError:
    """K01, with the newest older checkpoint that verifies (found by reading it, which takes its time)."""
    step = step_of(folder)
    fix = "resume from an older checkpoint, or start again"
    if step is not None and folder.parent.name == FOLDER:
        older = newest_whole(folder.parent.parent, below=step)
        fix = (
            f"resuming from step-{step_of(older)} is possible: {older} is whole"
            if older is not None
            else "no older checkpoint of this run is whole: start again"
        )
    name = f"step-{step}" if step is not None else folder.name
    return UsageError(
        f"checkpoint {name} is damaged: {damage}",
        where=str(folder / damage.file),
        likely="the disk, or a copy that was cut short"
        if damage.file
        else "a file of another save was put in",
        fix=fix,
        code="K01",
    )


def not_written(checkpoints: Path, step: int, reason: str, number: int | None, rank: int) -> UsageError:
    """K02: `reason` is the system's word, `number` its errno if known."""
    likely, fix = (
        "the disk or the network file system fails",
        "look at the disk, or set out.dir to another one",
    )
    if number in _FULL:
        likely, fix = (
            f"the disk is full{_free(checkpoints)}",
            "free some space, keep fewer checkpoints, or set out.dir",
        )
    elif number == errno.EFBIG:
        likely, fix = (
            "files may not be that large here",
            "ulimit -f unlimited, or out.dir on another file system",
        )
    elif number in _FORBIDDEN:
        likely, fix = "the folder is read-only for this user", "set out.dir to a folder that you may write"
    return UsageError(
        f"checkpoint step-{step} could not be written: {reason}{UNTOUCHED}",
        where=str(checkpoints),
        likely=likely,
        fix=fix,
        rank=rank,
        code="K02",
    )


def misfit(folder: Path, first: str, count: int) -> UsageError:
    """K03: whole, but of another model."""
    more = f" (and {count - 1} more)" if count > 1 else ""
    return UsageError(
        f"checkpoint {folder.name} does not fit this run: {first}{more}",
        where=str(folder),
        likely="the model, the dtype or the optimiser is not the one that was saved",
        fix="resume with the recipe in the run's config.resolved.toml",
        code="K03",
    )


def bad_cut(step: int, reason: str) -> UsageError:
    """K04: the pieces that the ranks gave do not make up the tensors."""
    return UsageError(
        f"checkpoint step-{step} was not saved, it could not be loaded: {reason}",
        likely="a defect of the plan's cut: the ranks' pieces must tile every tensor exactly once",
        fix="report this, with the plan",
        code="K04",
    )


def _free(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f", {shutil.disk_usage(folder).free / 2**30:.2f} GiB free"
    except OSError:
        return ""

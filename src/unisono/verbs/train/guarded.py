"""`unisono train` under a guardian: whether there is one, and what a supervisor does in the place of a killed one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unisono.launch import env
from unisono.launch.guardian import GuardianPipe, guarded, may_guard
from unisono.spec.settings import Settings
from unisono.train.state import history
from unisono.verbs.train.folder import MADE, has_checkpoint, unmake
from unisono.verbs.train.order import TrainOrder


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
    with suppress(OSError):
        history.note(run_dir, "lost", at=known.at, whole=True, lost={"supervisor": known.died})
    checkpoint = "" if known.saved else order.checkpoint
    resume = order.resume or has_checkpoint(run_dir)
    return replace(order, run_dir=run_dir, resume=resume, checkpoint=checkpoint, auto=False)

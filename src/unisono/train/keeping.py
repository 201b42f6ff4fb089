"""How a session keeps what it has made: the state beside tensors, news of a checkpoint, an end in good order."""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.train.recovery.drain import DrainParts
from unisono.train.state import history
from unisono.train.state.checkpoint.find import step_of
from unisono.train.state.run_state import kept_of, pieces_of

if TYPE_CHECKING:
    from unisono.train.session import Live


def drain_parts(live: "Live") -> DrainParts:
    """What saves within a step, should the grace be too short to finish it."""
    order, run = live.order, live.run

    def save() -> Path | None:
        if step_of(Path(live.saved)) != run.step:
            if not run.step:
                return None
            live.journal.flush(must=True)
            pieces = [*pieces_of(run), *kept_of(run)]
            announce(live, live.saver.beside(run.step, pieces, beside_tensors(live)))
        end(live)
        return order.run_dir / live.saved

    grace, store = order.recipe.launch.grace, order.store.clone() if order.line.hears else None
    settled = partial(_is_settled, live)
    return DrainParts(run, live.clock, order.line, store, order.place.world, grace, save, settled)


def _is_settled(live: "Live") -> bool:
    """Whether all of the last finished step is written down."""
    return live.looked == live.run.step


def end(live: "Live") -> None:
    """This start ends in good order."""
    if live.order.place.rank == 0:
        with suppress(OSError):
            history.note(live.order.run_dir, "end", step=live.run.step)


def beside_tensors(live: "Live") -> dict[str, Any]:
    """What checkpoints keep beside tensors."""
    return {
        "step": live.run.step,
        "data": {"fingerprint": live.corpus.fingerprint},
        "plan": str(live.order.plan),
        "last_bits": dict(live.order.last_bits),
        "val": [pair for pair in live.val_losses if math.isfinite(pair[1])],
        "recipe": live.order.recipe.model_dump(mode="json"),
        "cut_names": {name: list(own) for name, own in live.run.local.cut_names.items()},
        "bad": live.bad.state(),
    }


def announce(live: "Live", folder: Path | None) -> None:
    """A checkpoint is known from the moment that it is whole on disk, not before."""
    if folder is not None:
        live.saved = f"{folder.parent.name}/{folder.name}"
        if live.order.place.rank == 0:
            live.order.line.send("saved", path=live.saved)

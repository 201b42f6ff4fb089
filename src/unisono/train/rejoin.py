"""A run among ranks that meet anew, after one of them was lost.

Its state comes out of the ranks' memory. Where nobody holds a part of it, all go back to the newest checkpoint or, if
there is none, to the beginning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.config import Recipe
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.rendezvous import Rendezvous
from unisono.train.ahead import AheadUpdate
from unisono.train.build import Place, build, connect
from unisono.train.checkpoint import Box
from unisono.train.checkpoint.find import FOLDER, by_age, first_whole
from unisono.train.data.dataset import Corpus
from unisono.train.flow import unflushed
from unisono.train.handover import NotHeld, PeerMemory
from unisono.train.run import Run
from unisono.train.state import kept_of, pieces_of, refill, restore


@dataclass(slots=True)
class Remembered:
    """What this rank holds of the run for a rendezvous to come: nothing where it is new. val_losses: of validations, by
    step. recent: steps told, see Journal. bad: what is kept of bad steps."""

    run: Run | None = None
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)
    bad: Mapping[str, Any] = field(default_factory=dict)


def losses(state: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Of validations by step, as they are kept beside tensors."""
    return [(int(step), float(loss)) for step, loss in state.get("val", ())]


def regained(
    recipe: Recipe,
    plan: Plan,
    place: Place,
    run_dir: Path,
    corpus: Corpus,
    rendezvous: Rendezvous,
    kept: Remembered,
    note: Callable[[str], None],
) -> tuple[Run, dict[str, Any], Path | None]:
    """The run, what was kept beside its tensors, and the checkpoint of both, if they are from one. kept: is up to date
    afterwards. Every rank calls it, or it hangs."""
    memory = _remembered(plan, place, rendezvous, kept)
    connect(place, rendezvous.store)
    here, folder = replace(place, scratch=run_dir), None
    run = build(recipe, plan, here, corpus, Recorder(place.rank), filled=False)
    try:
        state = refill(run, memory)
    except NotHeld as missing:
        folder = _newest(run_dir, place, rendezvous, note)
        if folder is None:
            run = build(recipe, plan, here, corpus, Recorder(place.rank))
        state = restore(run, folder) if folder is not None else {}
        note(f"{missing}: going on from {folder.name if folder else 'the beginning'}")
    kept.run, kept.val_losses, kept.bad = (
        run,
        losses(state),
        state.get("bad", {}),
    )  # should one more be lost before all train again
    return run, state, folder


def _remembered(plan: Plan, place: Place, rendezvous: Rendezvous, kept: Remembered) -> PeerMemory:
    """What ranks hold of the run: nothing where an update was under way, or where updates follow their step."""
    run, boxes = kept.run, list[Box]()
    holds = run is not None and run.whole and not isinstance(run.update, AheadUpdate)
    if run is not None and holds and unflushed(plan) is None:
        boxes = [*pieces_of(run), *kept_of(run)]
    beside = {"val": kept.val_losses, "recent": kept.recent, "bad": kept.bad}
    step, state = (run.step, beside) if run is not None and boxes else (-1, {})
    return PeerMemory(place.rank, place.world, rendezvous.store, boxes, step, state, place.device)


def _newest(run_dir: Path, place: Place, rendezvous: Rendezvous, note: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, as rank 0 sees it."""
    if place.rank == 0:
        folder, faults = first_whole(by_age(run_dir))
        for fault in faults:
            note(fault)
        rendezvous.store.set("checkpoint", folder.name if folder is not None else "")
    name = rendezvous.store.get("checkpoint").decode()
    return run_dir / FOLDER / name if name else None

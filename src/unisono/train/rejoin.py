"""A run among ranks that meet anew, after one of them was lost.

Its state comes out of the ranks' memory. Where nobody holds a part of it, all go back to the newest checkpoint or, if
there is none, to the beginning.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.plan.grammar import member
from unisono.spec.rendezvous import Rendezvous
from unisono.spec.words import listed
from unisono.train.build.build import Place, build, connect
from unisono.train.build.continued import go_on
from unisono.train.data.dataset import Corpus
from unisono.train.rank_order import RankOrder
from unisono.train.recovery.peer_restore import Incomplete, PeerRestore
from unisono.train.recovery.replication import SnapshotReplicas
from unisono.train.recovery.snapshot_buffer import Snapshot, SnapshotBuffer
from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.find import FOLDER, by_age, first_whole
from unisono.train.state.run_state import kept_of, pieces_of, refill, restore
from unisono.train.step.overlap import unflushed
from unisono.train.step.run import Run


@dataclass(slots=True)
class CarriedState:
    """What this rank holds of the run for a rendezvous to come: nothing where it is new. val_losses: of validations, by
    step. recent: steps told, see Journal. bad: what is kept of bad steps."""

    run: Run | None = None
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)
    bad: Mapping[str, Any] = field(default_factory=dict)


def losses(state: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The losses of validations by step, as checkpoints keep them."""
    return [(int(step), float(loss)) for step, loss in state.get("val", ())]


def rebuild(
    order: RankOrder, corpus: Corpus, rendezvous: Rendezvous, kept: CarriedState, note: Callable[[str], None]
) -> tuple[Run, dict[str, Any], Path | None]:
    """The run, what was kept beside its tensors, and the checkpoint of both, if they are from one. order: of this
    meeting. kept: is up to date afterwards. Every rank that trains from here on calls it, or it hangs."""
    place = order.place
    recorder = order.faults.recorder(place.rank)
    order.faults.reached("recovery", rendezvous.epoch)
    memory = _memory(order, rendezvous, kept)
    run = build(order.recipe, order.plan, place, corpus, recorder, filled=False)
    folder = None
    try:
        state = refill(run, memory)
        if memory.stood_in:
            note(_went_back(memory))
        elif not run.sync.keeps_weights:
            note(f"going on after step {run.step}, of which servers have everything")
    except Incomplete as missing:
        folder = _newest(order.run_dir, place, rendezvous, note)
        if folder is None:
            run = build(order.recipe, order.plan, place, corpus, recorder)
        state = restore(run, folder) if folder is not None else go_on(run, order.recipe, corpus)
        note(f"{missing}: going on from {folder.name if folder else 'the beginning'}")
    memory.end()
    # Should one more be lost before all train again.
    kept.run, kept.val_losses, kept.bad = run, losses(state), state.get("bad", {})
    return run, state, folder


def hand_over(order: RankOrder, rendezvous: Rendezvous, kept: CarriedState) -> None:
    """What a rank does that is to leave: it gives what it holds to those that stay."""
    _memory(order, rendezvous, kept).give()


def _memory(order: RankOrder, rendezvous: Rendezvous, kept: CarriedState) -> PeerRestore:
    """What all hold that meet, who are connected then."""
    place, present = order.place, rendezvous.meeting.present
    policy = member("sync", order.plan.sync)
    lying = _with_servers(order, rendezvous, kept) if policy.served else []
    held = [*lying, *_held(kept, order.buffer, order.replicas)]
    memory = PeerRestore(place.rank, present, rendezvous.store, held, place.device)
    connect(place, rendezvous.store, present)
    return memory


def _with_servers(order: RankOrder, rendezvous: Rendezvous, kept: CarriedState) -> list[Snapshot]:
    """What of the run lies with servers on this rank. Every rank that meets calls it, or it hangs."""
    run, me, store = kept.run, order.place.rank, rendezvous.store

    def hear(name: str, ranks: Sequence[int]) -> list[Any]:
        return [json.loads(store.get(f"servers/{name}/{rank}")) for rank in ranks]

    def tell(name: str, said: Any) -> list[Any]:
        store.set(f"servers/{name}/{me}", json.dumps(said))
        return hear(name, left)

    store.set(f"servers/holds/{me}", json.dumps(run is not None))
    everyone = range(rendezvous.meeting.present)
    left = [rank for rank, holds in enumerate(hear("holds", everyone)) if holds]
    if run is None or (had := run.sync.salvage(tell)) is None:
        return []
    step, names = had
    lost = [slot.name for slot in run.local.slots if slot.live.requires_grad]
    boxes = without(
        pieces_of(run),
        {run.local.owners.get(n, n) for n in lost} - {run.local.owners.get(n, n) for n in names},
    )
    state = {"val": kept.val_losses, "bad": kept.bad, "recent": kept.recent}
    return [Snapshot(step, state, [*boxes, *kept_of(run)], live=True)]


def without(boxes: Sequence[Box], names: Set[str]) -> list[Box]:
    """The boxes but those of these parameters and of their optimiser state."""
    gone = tuple(f"{name}/" for name in names)
    return [box for box in boxes if not f"{box.name.partition('/')[2]}/".startswith(gone)]


def _held(
    kept: CarriedState, buffer: SnapshotBuffer | None, replicas: SnapshotReplicas | None
) -> list[Snapshot]:
    """What this rank has of the run: what it trains with, but where an update was under way, or where updates follow
    their step; what is in its buffer, where whom it replaces may have put it; what it keeps for another host."""
    run, held, beside = kept.run, list[Snapshot](), dict[str, Any]()
    if run is not None:
        beside = {"recent": kept.recent}
        flushed = unflushed(run.replica.plan) is None
        if run.whole and run.sync.keeps_weights and not run.update.by_parts and flushed:
            state = {"val": kept.val_losses, "bad": kept.bad, **beside}
            held.append(Snapshot(run.step, state, [*pieces_of(run), *kept_of(run)], live=True))
    for snapshot in buffer.snapshots() if buffer is not None else ():
        if not held or snapshot.step != held[0].step:
            held.append(replace(snapshot, state={**snapshot.state, **beside}))
    if replicas is None:
        return held
    return merged(held, [snapshot for snapshot in replicas.snapshots() if snapshot.sound()], beside)


def merged(held: Sequence[Snapshot], others: Sequence[Snapshot], beside: Mapping[str, Any]) -> list[Snapshot]:
    """What a rank has itself, and for others, as one snapshot of each step. others: sound ones."""
    steps = {snapshot.step: snapshot for snapshot in held}
    for other in others:
        mine = steps.get(other.step, Snapshot(other.step, {**other.state, **beside}, []))
        steps[other.step] = replace(mine, boxes=[*mine.boxes, *other.boxes])
    return list(steps.values())


def _went_back(memory: PeerRestore) -> str:
    """After which step the run goes on where snapshots served, and what that costs."""
    again, several = memory.newest - memory.step, len(memory.stood_in) > 1
    cost = f"; {again} step{'s' * (again > 1)} again" if again else ""
    return f"going on after step {memory.step} by snapshots of rank{'s' * several} {listed(memory.stood_in)}{cost}"


def _newest(run_dir: Path, place: Place, rendezvous: Rendezvous, note: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, as rank 0 sees it."""
    if place.rank == 0:
        folder, faults = first_whole(by_age(run_dir))
        for fault in faults:
            note(fault)
        rendezvous.store.set("checkpoint", folder.name if folder is not None else "")
    name = rendezvous.store.get("checkpoint").decode()
    return run_dir / FOLDER / name if name else None

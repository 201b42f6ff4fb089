"""What each rank of a proof does: it makes steps, each from the reference's own state, and records all tensors.

Every step of a plan begins where the reference began it: parameters and optimiser state are loaded from the reference's
checkpoint, cut for this plan. So errors do not compound over steps, and the bound of one step is the bound of each.
Where several steps make one update, they are one step here (`bounds.steps_of`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.config import Resolved
from unisono.observe.span import Recorder
from unisono.parallel.params import Slot, dense_of
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import Leaf, Player, noise_of
from unisono.parallel.precision import computing
from unisono.plan import Plan
from unisono.programs.pipeline import Action
from unisono.sync import Verdict
from unisono.train.build.build import Place, build, feeds
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Feed
from unisono.train.state.checkpoint import Box, load, read_full, save, tensor_names
from unisono.train.state.run_state import Stored, kept_of, numbers_of, pieces_of, refill
from unisono.train.step.grad_norm import Measure
from unisono.train.step.numbers import Numbers
from unisono.train.step.run import Run
from unisono.train.step.scaling import Unscaled
from unisono.train.step.train_step import fetch, next_step, train
from unisono.train.step.update import Report, Update
from unisono.verify.bounds import Bounds, lag_of, sources_of, steps_of
from unisono.verify.record import Observed
from unisono.verify.stretch import play_stretch
from unisono.verify.twin import make_twin


@dataclass(slots=True)
class Watching(Player):
    """A player that records its leaves and the loss of each."""

    inner: Player
    seen: Observed

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        for leaf in leaves:
            self.seen.leaf(leaf)
        sizes = self.inner.watch_sizes()
        losses = self.inner.play(row, leaves, weight, seed)
        ended = {
            action.micro for action in row if action.kind == "F" and action.stage in self.seen.last_stages
        }
        facts = self.seen.note.leaves[-len(leaves) :]
        for micro, (fact, loss) in enumerate(zip(facts, losses.tolist(), strict=True)):
            fact["loss"], fact["ended"] = loss, micro in ended
            fact["size"] = abs(loss) if sizes is None else sizes.get(micro, 0.0)
        return losses


@dataclass(slots=True)
class Measuring:
    """A measure that first records the gradients, which are final then and not yet clipped."""

    inner: Measure
    seen: Observed

    def __call__(self, slots: Sequence[Slot], extra: Tensor) -> list[float]:
        self.seen.keep("raw")
        return self.inner(slots, extra)


@dataclass(slots=True)
class Updating:
    """An update that afterwards records the gradients, which are clipped then."""

    inner: Update
    seen: Observed

    @property
    def scaler(self) -> Unscaled:
        """The scaler of the update inside."""
        return self.inner.scaler

    @property
    def keeps(self) -> Mapping[str, Tensor]:
        """What the update inside keeps between steps."""
        return self.inner.keeps

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages of weights that the update inside keeps."""
        return self.inner.averages

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of the update inside."""
        return self.inner.optimizer

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        report = self.inner(step, verdict, numbers)
        if report.verdict is Verdict.APPLY:
            self.seen.keep("grad")
        return report


def checkpoint_of(folder: Path, step: int) -> Path:
    """Where the reference's state after step `step` lies."""
    return folder / "checkpoints" / f"step-{step:06d}"


def record_of(folder: Path, step: int) -> Path:
    """Where the records of step `step` lie."""
    return folder / f"record-{step}"


def start(resolved: Resolved, place: Place, corpus: Corpus) -> tuple[Run, Feed]:
    """A run at step 0 and its batches."""
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(place.rank))
    run.replica = replace(
        run.replica, steps=0
    )  # no step is the last, in which more than one update may be made
    return run, feeds(resolved.recipe, resolved.plan, corpus, place.device, kept=run.update.keeps)[0]


def watched_step(run: Run, feed: Feed, steps: range) -> Observed:
    """Make the steps of one update and record them: the mean of their losses, and everything else of the last one."""
    seen = Observed(run)
    player, measure, update = run.player, run.measure, run.update
    run.step = steps.start
    run.player = Watching(player, seen)
    try:
        if not steps.start:
            seen.keep("init")
        losses = [next_step(run, feed, fetched=seen.begin).loss for _ in steps[:-1]]
        run.measure = Measuring(measure, seen)
        run.update = Updating(update, seen)  # type: ignore[assignment]
        report = next_step(run, feed, fetched=seen.begin)
    finally:
        run.player, run.measure, run.update = player, measure, update
    seen.keep("model")
    seen.keep("optim")
    seen.keep("ema")
    seen.keep_buffers()
    seen.note.loss = math.fsum((*losses, report.loss)) / len(steps)
    seen.note.norm, seen.note.lr, seen.note.finite = report.norm, report.lr, report.finite
    return seen


def rewind(run: Run, plan: Plan, reference: Path, step: int, numbers: bool = True) -> None:
    """Give the run the reference's state before step `step` of the proof, cut for this rank. numbers: with those that
    its update keeps; a plan has its own, from its own gradients."""
    run.step = steps_of(plan, step).start
    if step:
        kept = numbers_of(run) if numbers else []
        load(checkpoint_of(reference, step - 1), [*pieces_of(run), *kept])


def play_reference(resolved: Resolved, place: Place, corpus: Corpus, steps: int, folder: Path) -> None:
    """One process: the run that plans are held to, its records and its checkpoints."""
    run, feed = start(resolved, place, corpus)
    for step in range(steps):
        watched_step(run, feed, steps_of(resolved.plan, step)).write(record_of(folder, step))
        save(folder, step, _state_of(run), {}, rank=0, world=1, token="reference")
    play_stretch(run, resolved, place, corpus, folder)


def _state_of(run: Run) -> list[Box]:
    """What the one device has between two updates; gradients on their way too."""
    return [*pieces_of(run), *(kept_of(run) if lag_of(run.replica.plan) else numbers_of(run))]


def play_plan(
    resolved: Resolved, place: Place, corpus: Corpus, steps: int, folder: Path, reference: Path
) -> Run:
    """All ranks of a plan; the records are complete when this returns the run, as it stands after the last step."""
    run, feed = start(resolved, place, corpus)
    for step in range(steps):
        rewind(run, resolved.plan, reference, step, numbers=False)
        watched_step(run, feed, steps_of(resolved.plan, step)).write(record_of(folder, step))
    run.mesh.world.barrier()
    return run


def play_twin(
    resolved: Resolved,
    place: Place,
    corpus: Corpus,
    steps: int,
    folder: Path,
    reference: Path,
    bounds: Bounds,
) -> None:
    """One process: the reference's stretch once more, with all gradients from the last compared step on pushed as far
    as `bounds` allow."""
    run, feed = start(resolved, place, corpus)
    rewind(run, resolved.plan, reference, steps - 1)
    if lag_of(resolved.plan) and steps > 1:
        refill(run, Stored(checkpoint_of(reference, steps - 2)))
    make_twin(run, bounds)
    for _ in train(run, feed, steps_of(resolved.plan, steps).start):
        pass
    play_stretch(run, resolved, place, corpus, folder)


def play_leaves(
    resolved: Resolved, place: Place, corpus: Corpus, step: int, reference: Path, room: int = 1 << 27
) -> dict[str, Tensor]:
    """One process: name → [leaves, ...], the gradient that each leaf of step `step` adds. The second use of a tied
    weight has its own entry, and its owner's entry is the first use alone.

    room: elements that may be held; without room for all tensors, the small ones are kept.
    """
    run, feed = start(resolved, place, corpus)
    rewind(run, resolved.plan, reference, max(0, step - lag_of(resolved.plan)))
    steps = sources_of(resolved.plan, step)
    chosen: list[Slot] = []
    for slot in sorted(run.local.slots, key=lambda s: s.live.numel()):
        room -= slot.live.numel() * len(run.leaves) * len(steps)
        if room >= 0:
            chosen.append(slot)
    kept: dict[str, list[Tensor]] = {slot.name: [] for slot in chosen}

    def done(_: int) -> None:
        for slot in chosen:
            grad = slot.live.grad
            kept[slot.name].append(torch.zeros_like(slot.live) if grad is None else dense_of(grad).clone())
        for slot in run.local.slots:
            slot.drop_gradient()

    if not isinstance(run.player, StagePlayer):
        raise TypeError("a run that was just built plays with its stages")
    run.player.after_backward = done
    for leaves in (fetch(run, feed, at) for at in steps):
        targets = sum(leaf.targets.numel() for leaf in leaves)
        run.player.play(run.row, leaves, run.sync.weigh(targets) / len(steps), run.seed)
    return {name: torch.stack([g.detach().cpu() for g in grads]) for name, grads in kept.items()}


def tokens_of(
    resolved: Resolved, corpus: Corpus, step: int, reference: Path
) -> list[tuple[frozenset[int], frozenset[int]]]:
    """The tokens of each leaf of step `step`: in its inputs, in its targets."""
    feed, _ = feeds(
        resolved.recipe, resolved.plan, corpus, torch.device("cpu"), kept=_numbers_before(reference, step)
    )
    leaves = [leaf for at in steps_of(resolved.plan, step) for leaf in feed.fetch(at, range(feed.count(at)))]
    sides = [(leaf.inputs.flatten().tolist(), leaf.targets.flatten().tolist()) for leaf in leaves]
    return [(frozenset(inputs), frozenset(targets)) for inputs, targets in sides]


def _numbers_before(reference: Path, step: int) -> Mapping[str, Tensor]:
    """What the reference's update kept before step `step` of the proof, by the names of `Update.keeps`."""
    if not step:
        return {}
    folder = checkpoint_of(reference, step - 1)
    names = [name for name in tensor_names(folder) if name.startswith("update/")]
    return {name.partition("/")[2]: number for name, number in read_full(folder, names).items()}


def losses_with(
    resolved: Resolved, place: Place, corpus: Corpus, step: int, reference: Path, state: int
) -> list[float]:
    """One process: the losses of step `step`'s leaves under the reference's parameters before step `state`."""
    run, feed = start(resolved, place, corpus)
    rewind(run, resolved.plan, reference, state)
    losses: list[float] = []
    for leaves in (fetch(run, feed, at) for at in steps_of(resolved.plan, step)):
        targets = sum(leaf.targets.numel() for leaf in leaves)
        with torch.no_grad():
            losses += run.player.play(run.eval_row, leaves, run.sync.weigh(targets), run.seed).tolist()
    return losses


def crossed_losses(
    resolved: Resolved, place: Place, corpus: Corpus, step: int, reference: Path, most: int = 64
) -> Tensor | None:
    """One process: [inputs of leaf i, targets of leaf j], the losses if leaves were mixed up; None for many leaves."""
    run, feed = start(resolved, place, corpus)
    leaves = [leaf for at in steps_of(resolved.plan, step) for leaf in fetch(run, feed, at)]
    if len(leaves) > most:
        return None
    rewind(run, resolved.plan, reference, step)
    targets = sum(leaf.targets.numel() for leaf in leaves)
    weight = run.sync.weigh(targets / len(steps_of(resolved.plan, step)))
    (stage,), rows = run.local.stages.values(), []
    with torch.no_grad(), computing(resolved.plan.precision, place.device):
        for leaf in leaves:
            y = stage(leaf.inputs, noise_of(leaf, run.seed))
            rows.append(
                torch.stack([stage.loss(y, other.targets) * (weight * other.scale) for other in leaves])
            )
    return torch.stack(rows).cpu()

"""The stretch behind the compared steps: what `train` does besides single steps, once for each plan.

    two steps in a row from the plan's own state, over the end of an epoch
    validation
    a save in the background, while everything is forgotten
    all of it read back from that save

Each part is the one that `train` uses. Ranks write down what they met as JSON; the saved checkpoint is the state.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.config import Resolved
from unisono.parallel.player import Leaf, noise_of
from unisono.parallel.precision import computing
from unisono.spec.training import METRICS
from unisono.train.build.build import Place, feeds
from unisono.train.data.dataset import Corpus, Thinned
from unisono.train.data.feed import Feed, Micro, Permuted
from unisono.train.state.checkpoint import Saver
from unisono.train.state.run_state import kept_of, numbers_of, pieces_of, restore
from unisono.train.step.evaluate import evaluate
from unisono.train.step.run import Run
from unisono.train.step.train_step import fetch, train
from unisono.verify.bounds import rhythm_of
from unisono.verify.record import digest
from unisono.verify.twin import size_of_step

ROW = 2  # updates from the plan's own state before it is saved; with the last compared one, three in a row
BATCHES = 2  # of validation


@dataclass(slots=True)
class StretchRecord:
    """What one rank met.

    steps: loss, its size where that is another, norm and rate of each step in a row, with the leaves it read.
    validation: loss and metrics. resumed: what is not as it was before everything was read back. Where there is one
    device, bare: the validation loss by the bare modules; epochs: what is wrong with the samples' order.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    bare: float | None = None
    epochs: str = ""
    resumed: list[str] = field(default_factory=list)


class Noting(Feed):
    """A feed that notes what was read last: [position of a leaf's first sample, hash of its numbers] of each leaf."""

    def __init__(self, inner: Feed) -> None:
        self.inner = inner
        self.read: list[tuple[int, str]] = []

    def count(self, step: int) -> int:
        return self.inner.count(step)

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        micros = self.inner.fetch(step, leaves)
        self.read = [(int(leaf.samples[0]), digest(leaf.inputs) + digest(leaf.targets)) for leaf in micros]
        return micros


def play_stretch(run: Run, resolved: Resolved, place: Place, corpus: Corpus, folder: Path) -> None:
    """From where the run stands. Every rank calls it, or it hangs."""
    recipe, first, met = resolved.recipe, run.step, StretchRecord()
    row = ROW * rhythm_of(resolved.plan)
    batch = recipe.train.global_batch
    count = min(len(corpus.train), batch * (first + 1) + batch // 2)  # an epoch ends in the second step
    corpus = replace(corpus, train=Thinned(corpus.train, count))
    feed, validation = feeds(recipe, resolved.plan, corpus, place.device, kept=run.update.keeps)
    met.steps += _steps_of(run, feed, first + row)
    if run.step == first + row:  # else a number was not finite, which is what will be told
        _validate(run, resolved, validation, met)
        met.resumed = _forget_and_resume(run, resolved, place, corpus, folder)
    if place.world == 1:
        met.epochs = _odd_epochs(recipe.seed, batch, resolved.batch.micro_batch)
    (folder / f"told-{place.rank}.json").write_text(
        json.dumps([getattr(met, n) for n in StretchRecord.__slots__])
    )


def _forget_and_resume(run: Run, resolved: Resolved, place: Place, corpus: Corpus, folder: Path) -> list[str]:
    """What is not as it was, in words."""
    arguments = (resolved.recipe, resolved.plan, corpus, place.device)
    fresh = lambda: feeds(*arguments, kept=run.update.keeps)[0]
    before, saver = _going_on(run, fresh()), Saver(folder, place.rank, place.world, token="stretch")
    steps_made = run.step
    saver.save(steps_made, [*pieces_of(run), *kept_of(run)], {"step": steps_made}, blocking=False)
    for box in (*pieces_of(run), *numbers_of(run)):
        box.tensor.fill_(torch.nan if box.tensor.is_floating_point() else 0)
    run.step = -1
    run.mesh.world.barrier()  # ranks on threads: all have begun to save before one waits for the others' files
    saver.wait()
    run.mesh.world.barrier()
    restore(run, saved_by(folder, steps_made))
    after = _going_on(run, fresh())
    same = {
        what: torch.equal(after[what], was) if isinstance(was, Tensor) else after[what] == was
        for what, was in before.items()
    }
    return [what for what in before if not same[what]]


def saved_by(folder: Path, steps_made: int) -> Path:
    """Return where the checkpoint of a stretch lies. steps_made: by the run, up to the end of the stretch."""
    return folder / "checkpoints" / f"step-{steps_made:06d}"


def met_by(folder: Path, ranks: int) -> list[StretchRecord]:
    """What each rank met."""
    return [StretchRecord(*json.loads((folder / f"told-{rank}.json").read_text())) for rank in range(ranks)]


def _steps_of(run: Run, feed: Feed, until: int) -> list[dict[str, Any]]:
    noting, sizes = Noting(feed), run.player.watch_sizes()
    return [
        {
            "step": r.step,
            "loss": r.loss,
            "size": size_of_step(sizes),
            "norm": r.norm,
            "lr": r.lr,
            "read": noting.read,
        }
        for r in train(run, noting, until)
    ]


def _going_on(run: Run, feed: Feed) -> dict[str, Any]:
    """What the next step would begin with, in words → a copy."""
    noting, step = Noting(feed), max(0, run.step)
    fetch(run, noting, step)
    pieces = {box.name: box.tensor.clone() for box in (*pieces_of(run), *numbers_of(run))}
    return {"step": run.step, "learning rate": run.update.rate(step), "samples": noting.read, **pieces}


def _validate(run: Run, resolved: Resolved, feed: Any, met: StretchRecord) -> None:
    """Validate where there is something to validate on."""
    if not feed.samples:
        return
    train = resolved.recipe.train
    batches = [fetch(run, feed, i) for i in range(min(BATCHES, train.eval_batches))]
    loss, metrics = evaluate(run, batches, [METRICS.read(text) for text in train.metrics])
    met.validation = {"loss": loss, **metrics}
    if run.mesh.world.size == 1:
        met.bare = _bare(run, resolved, [leaf for leaves in batches for leaf in leaves])


@torch.no_grad()
def _bare(run: Run, resolved: Resolved, leaves: Sequence[Leaf]) -> float:
    """The mean loss by nothing but the modules, none of which drops anything."""
    (stage,) = run.local.stages.values()
    stage.eval()
    with computing(resolved.plan.precision, run.local.device):
        losses = [
            stage.loss(stage(leaf.inputs, noise_of(leaf, None)), leaf.targets).item() for leaf in leaves
        ]
    stage.train()
    return sum(losses) / sum(leaf.targets.numel() / leaf.scale for leaf in leaves)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A dataset whose samples are their numbers."""

    count: int

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """[n], twice."""
        return torch.from_numpy(indices), torch.from_numpy(indices)


def _odd_epochs(seed: int, global_batch: int, micro_batch: int) -> str:
    """What is wrong with three epochs that end amid steps: each sample once in each, in another order; or ""."""
    count = 2 * global_batch + global_batch // 2 + 1
    feed = Permuted(_Numbers(count), seed, global_batch, micro_batch)
    leaves = range(global_batch // micro_batch)
    steps = -(-3 * count // global_batch)
    line = torch.cat([leaf.inputs for step in range(steps) for leaf in feed.fetch(step, leaves)])
    epochs = line[: 3 * count].view(3, count)
    if not torch.equal(epochs.sort(1).values, torch.arange(count).expand(3, count)):
        return f"of {count} samples some are read twice in an epoch, and some not at all"
    return f"every epoch of {count} samples has the same order" if torch.equal(epochs[0], epochs[1]) else ""

"""Small runs in float64 on ranks that are threads, for policies whose replicas have weights of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono.train.step.update import Report
from unisono_contrib.comm import threads

TEXT = "to be or not to be, that is the question: " * 40


@dataclass(slots=True)
class Trained:
    """Of one rank: reports and weights of each step, those at the start, "the" weights at the end, bytes sent over dp in
    each step, and by operation in all."""

    reports: list[Report] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    center: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)

    @property
    def last(self) -> Tensor:
        return flat(self.weights[-1])


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for _, x in sorted(weights.items())])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def recipe_of(source: Path, steps: int, batch: int = 4, **train: Any) -> Recipe:
    source.write_text(TEXT, encoding="utf-8")
    options = {"optimizer": "sgd", "lr": 0.1, "clip": 0.0, "weight_decay": 0.0, **train}
    if options["optimizer"] == "sgd":
        options.setdefault("momentum", 0.0)
    return Recipe(
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8),
        data=DataConfig(source=f"text:{source}"),
        train=TrainConfig(steps=steps, global_batch=batch, micro_batch=1, dtype="float64", **options),
    )


def play(
    recipe: Recipe,
    plan: str,
    *,
    twins: bool = False,
    save_at: int = -1,
    folder: Path | None = None,
    begin: Path | None = None,
    steps: int | None = None,
    watch: Callable[[Run, int], None] = lambda run, step: None,
    stop: Callable[[int, int], bool] = lambda rank, step: False,
    feed_of: Recipe | None = None,
) -> list[Trained]:
    """Train on all ranks of a plan. twins: every replica computes the samples of the first. save_at: after how many
    steps a checkpoint is written into `folder`. begin: the checkpoint to begin from. stop(rank,
    step): whether a rank is asked to. feed_of: whose batches are read, of which this recipe's may be a part."""
    parsed = Plan.parse(f"{plan} precision=fp64")
    ranks = parsed.world

    def rank_of(rank: int) -> Trained:
        resolved = resolve(recipe, str(parsed), ranks)
        place = place_of(rank, ranks, rank, "gloo", 60.0)
        recorder, corpus = Recorder(rank), load(recipe.data, recipe.model)
        run = build(resolved.recipe, resolved.plan, place, corpus, recorder)
        read = resolved if feed_of is None else resolve(feed_of, "dp=1 precision=fp64", 1)
        feed, _ = feeds(read.recipe, read.plan, corpus, place.device)
        if begin is not None:
            restore(run, begin)
        out = Trained(start={slot.name: slot.master.detach().clone() for slot in run.local.slots})
        count = run.of_leaves // run.mesh.dp.size
        while (step := run.step) < (steps or recipe.train.steps):
            if step == save_at and folder is not None:
                save_now(run, folder, rank, ranks)
            leaves = run.leaves
            if twins:
                leaves = range(leaves.start % count, (leaves.stop - 1) % count + 1, leaves.step)
            before = sent_by(recorder)
            out.reports.append(train_step(run, feed.fetch(step, leaves), partial(stop, rank, step)))
            out.sent.append(sent_by(recorder) - before)
            slots = {slot.master.data_ptr(): slot for slot in reversed(run.local.slots)}.values()
            out.weights.append({slot.name: slot.master.detach().clone() for slot in slots})
            out.metrics.append(dict(run.sync.metrics()))
            watch(run, step)
            if out.reports[-1].bad:
                break
        out.center = {name: x.detach().clone() for name, x in run.sync.center().items()}
        out.state = {name: x.detach().clone() for name, x in run.sync.state().items()}
        out.ledger = {op: nbytes for (axis, op), nbytes in recorder.bytes().items() if axis == "dp"}
        return out

    return threads.run(ranks, rank_of)


def save_now(run: Run, folder: Path, rank: int, ranks: int) -> None:
    boxes = [*pieces_of(run, center=run.sync.center()), *kept_of(run)]
    save(folder, run.step, boxes, {"step": run.step}, rank=rank, world=ranks, token="t")


def sent_by(recorder: Recorder) -> int:
    return sum(nbytes for (axis, _), nbytes in recorder.bytes().items() if axis == "dp")


def gradients_of(recipe: Recipe, replicas: int) -> Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]]:
    """(step, replica, weights) → the gradient of that replica's share of the step's batch, by one device that plays no
    policy: what an oracle is written with."""
    whole, place = resolve(recipe, "dp=1 precision=fp64", 1), place_of(0, 1, 0, "gloo", 60.0)
    share = (recipe.train.global_batch or 1) // replicas
    part = recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch": share})})
    resolved, corpus = resolve(part, "dp=1 precision=fp64", 1), load(recipe.data, recipe.model)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(0))
    feed, _ = feeds(whole.recipe, whole.plan, corpus, place.device)

    slots = {slot.master.data_ptr(): slot for slot in reversed(run.local.slots)}.values()  # each storage once

    def gradients(step: int, replica: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = feed.fetch(step, range(replica * share, (replica + 1) * share))
        with torch.no_grad():
            for slot in slots:
                if slot.name in weights:
                    slot.master.copy_(weights[slot.name])
        targets = sum(leaf.targets.numel() for leaf in leaves)
        run.gradients.forget()
        run.player.play(run.row, leaves, 1.0 / targets, run.seed)
        run.gradients.close()
        out = {s.name: s.master.grad.clone() for s in slots if s.master.grad is not None}
        run.gradients.forget()
        return out

    gradients.start = {s.name: s.master.detach().clone() for s in slots}  # type: ignore[attr-defined]
    return gradients


def mean(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

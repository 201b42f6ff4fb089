"""What every policy owes under which runs of their own meet: through a mailbox they compute what replicas compute."""

import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from unisono.config import DataConfig, LaunchConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.sync import OuterPolicy
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step

STEPS = 6
NAMES = ("a", "b")
NEAR = 1e-9  # of weights in float64 after some steps, where only the order of sums differs
PATIENCE = 60.0  # seconds


def mail_faults(policy: OuterPolicy, text: str, source: Path, wanted: Tensor) -> Iterator[str]:
    """Two runs that meet through a mailbox have the weights of two replicas of one run, up to rounding: their threads
    may add up in another order. wanted: those weights. text: the policy as the plan says it."""
    if policy.neighbours > 1 or any(policy.mail_problems(Plan.parse(f"sync={text}"))):
        return
    results: dict[str, Tensor | Exception] = {}

    def play(name: str) -> None:
        try:
            results[name] = _peer(source, text, name)
        except Exception as error:
            results[name] = error

    peers = [threading.Thread(target=play, args=(name,), daemon=True) for name in NAMES]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(PATIENCE)
    for name in NAMES:
        match results.get(name):
            case None:
                yield f"a run that meets another one through a mailbox has not ended after {PATIENCE:.0f} s"
            case Exception() as error:
                yield f"a run that meets another one through a mailbox ends with {error}"
            case weights if not (off := float((weights - wanted).norm() / wanted.norm())) <= NEAR:
                yield f"run {name} of two that meet through a mailbox is off by {off:.1g} from a replica of one run"


def _peer(source: Path, text: str, name: str) -> Tensor:
    box = str(source.parent / "mailbox")
    launch = LaunchConfig(mailbox=box, peer=name, peers=len(NAMES), timeout=PATIENCE)
    resolved = resolve(recipe_of(source, 2, launch), f"dp=1 sync={text} precision=fp64", 1)
    recipe, plan, place = resolved.recipe, resolved.plan, place_of(0, 1, 0, "gloo", 60.0)
    corpus = load(recipe.data, recipe.model)
    run = build(recipe, plan, place, corpus, Recorder(0))
    try:
        run.step = run.sync.proceed(run.step)
        feed, _ = feeds(recipe, plan, corpus, place.device, run.sync.lane)
        while run.step < STEPS:
            train_step(run, feed.fetch(run.step, run.leaves))
    finally:
        run.sync.close()
    return flat(weights_of(run))


def recipe_of(source: Path, batch: int, launch: LaunchConfig | None = None) -> Recipe:
    """A small model on a text, trained with plain gradient descent."""
    return Recipe(
        model=ModelConfig(n_layer=1, n_head=2, d_model=32, context=8),
        data=DataConfig(source=f"text:{source}"),
        train=TrainConfig(
            steps=STEPS, global_batch=batch, micro_batch=1, dtype="float64", lr=1e-1, optimizer="sgd",
            momentum=0.9, clip=0.0,
        ),
        launch=launch or LaunchConfig(),
    )  # fmt: skip


def weights_of(run: Run) -> dict[str, Tensor]:
    """By name, this rank's weights, each storage once."""
    once = {slot.master.data_ptr(): slot for slot in reversed(run.local.slots)}
    return {slot.name: slot.master.detach() for slot in once.values()}


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All in one, by name."""
    return torch.cat([x.flatten() for _, x in sorted(weights.items())]).clone()

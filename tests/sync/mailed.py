"""Runs that meet through a mailbox, each on threads of its own; and a peer that only writes letters, by hand."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.sync.outer import flat, recipe_of, save_now
from unisono.config import LaunchConfig, Recipe, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.run_state import restore
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono.train.step.update import state_of
from unisono_contrib.comm import threads
from unisono_contrib.comm.depot import depot_at
from unisono_contrib.comm.mailbox import Mailbox, open_mailbox
from unisono_contrib.comm.mailbox.letters import Letter, post, read

Watch = Callable[[Run, int], None]
FACTS = {"h": 3, "outer lr": 0.7, "outer momentum": 0.5}
SYNC = "sync=diloco:h=3,outer_lr=0.7,outer_momentum=0.5"


@dataclass(slots=True)
class Peer:
    """Of the first rank of one run: the steps that it made, its weights after each, what it kept at the end."""

    steps: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    center: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    inner: dict[str, Tensor] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    def said(self, key: str) -> list[Any]:
        return [metrics[key] for metrics in self.metrics if key in metrics]


def inner_state(run: Run) -> dict[str, Tensor]:
    return {
        f"{slot.name}/{key}": value.clone()
        for slot in run.local.slots
        for key, value in state_of(run.update.optimizer, slot.master).items()
    }


def kept(run: Run) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in run.sync.state().items()}


def peer(
    source: Path,
    name: str,
    url: str,
    plan: str = SYNC,
    *,
    steps: int = 12,
    until: int | None = None,
    batch: int = 2,
    watch: Watch = lambda run, step: None,
    begin: Path | None = None,
    save_at: int = -1,
    folder: Path | None = None,
    leaves: bool = True,
    stop: Callable[[int], bool] = lambda step: False,
    **launch: Any,
) -> Peer:
    """Train as one peer. until: the step after which it goes away, without a word unless it `leaves`. watch: after each
    step, and once before the first."""
    text = source.with_name(f"{name}.txt")  # of its own: each writes it
    recipe = recipe_of(text, steps, batch, optimizer="adamw", clip=0.5)
    where = LaunchConfig(mailbox=url, peer=name, **{"peers": 1, "peer_timeout": 20.0, **launch})
    recipe = recipe.model_copy(update={"launch": where})
    parsed = Plan.parse(f"{plan} precision=fp64")

    def rank_of(rank: int) -> Peer:
        run, out = _built(recipe, parsed, rank), Peer()
        if begin is not None:
            restore(run, begin)
        try:
            run.step = run.sync.proceed(run.step)
            watch(run, run.step - 1)
            _train(run, recipe, out, rank, until or steps)
        finally:
            if leaves:
                run.sync.close()
        out.center = {name: x.detach().clone() for name, x in run.sync.center().items()}
        out.state, out.inner = kept(run), inner_state(run)
        return out

    def _train(run: Run, recipe: Recipe, out: Peer, rank: int, last: int) -> None:
        resolved = resolve(recipe, parsed, parsed.world)
        feed, _ = feeds(
            resolved.recipe, resolved.plan, load(recipe.data, recipe.model), run.local.device, run.sync.lane
        )
        while run.step < last:
            step = run.step
            if step == save_at and folder is not None:
                save_now(run, folder, rank, parsed.world)
            micros = feed.fetch(step, run.leaves)
            out.reports.append(train_step(run, micros, partial(stop, step)))
            out.steps.append(step)
            out.samples.append([int(x) for micro in micros for x in micro.samples])
            out.weights.append(flat(weights_of(run)))
            out.metrics.append(dict(run.sync.metrics()))
            watch(run, step)

    return rank_of(0) if parsed.world == 1 else threads.run(parsed.world, rank_of)[0]


def weights_of(run: Run) -> dict[str, Tensor]:
    """Each storage once."""
    slots = {slot.master.data_ptr(): slot for slot in reversed(run.local.slots)}.values()
    return {slot.name: slot.master.detach().clone() for slot in slots}


def _built(recipe: Recipe, plan: Plan, rank: int) -> Run:
    resolved = resolve(recipe, plan, plan.world)
    place = place_of(rank, plan.world, rank, "gloo", 60.0)
    return build(resolved.recipe, resolved.plan, place, load(recipe.data, recipe.model), Recorder(rank))


def together(*peers: Callable[[], Peer]) -> list[Peer]:
    """All at once, each on a thread. Raises what one of them raises."""
    results: dict[int, Peer] = {}
    errors: list[BaseException] = []

    def play(i: int) -> None:
        try:
            results[i] = peers[i]()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=play, args=(i,), daemon=True) for i in range(len(peers))]
    for thread in running:
        thread.start()
    while any(thread.is_alive() for thread in running) and not errors:
        running[0].join(0.05) if running[0].is_alive() else running[-1].join(0.05)
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(peers))]


def zed(url: str) -> Mailbox:
    """A peer whose letters the test writes. Its name is the last, so that the run under test decides."""
    return open_mailbox(url, "zed", alive_s=1000.0)


def like(weights: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(x, value) for name, x in weights.items()}


def outer_of(run: Run) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in run.sync.outer.items()}


def letter_of(url: str, round: int, name: str) -> Letter:
    """What a peer has posted in a round."""
    letter = read(depot_at(url, "test"), f"rounds/{round:08d}", name)
    assert letter is not None
    return letter


def published(url: str, round: int, outer: Mapping[str, Tensor]) -> None:
    """zed publishes, in nobody's turn: all weights are 0.25, all momentum 0.125."""
    momentum = {f"momentum/{name}": x for name, x in like(outer, 0.125).items()}
    letter = Letter("zed", round, 1.0, {**like(outer, 0.25), **momentum}, FACTS)
    assert post(depot_at(url, "test"), f"outer/{round:08d}", letter)

"""What every policy owes whose replicas have weights of their own: its identities, its meetings, its bytes, its state.

Such a run has no one device to be compared with. So a policy declares cases in which it computes what another policy
computes (`sync.Identity`), and is held to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unisono.config import resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import ConfigProblems
from unisono.spec.fidelity import Fidelity
from unisono.sync import Identity, OuterPolicy, Policy
from unisono.sync._outer import OuterSync
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads
from unisono_contrib.verify.conformance.mailed import NEAR, STEPS, flat, mail_faults, recipe_of, weights_of

SAVED, ASKED = 4, 2


@dataclass(frozen=True, slots=True)
class OuterPlay:
    """Of one rank: whether a step's report says to stop, its loss where all met, weights after all steps, "the" weights
    then, bytes that the policy keeps."""

    stops: list[bool]
    losses: list[float | None]
    weights: Tensor
    center: Tensor
    kept: int


def outer_faults(policy: OuterPolicy, folder: Path, text: str) -> Iterator[str]:
    """1. It declares identities, and they hold. 2. "The" weights are the same on all replicas. If the same run again
    has the same weights (`repeats`): 3. All hear of a request to stop in the same step, and report the same loss where
    they meet. 4. It keeps what it declares. 5. A run that was saved within a round goes on as one that was not. 6. If
    it `mails`: two runs that meet through a mailbox have the weights of two replicas."""
    source = folder / "text.txt"
    source.write_text("to be or not to be, that is the question: " * 40, encoding="utf-8")
    yield from identity_faults(policy, source)
    plan = f"dp=2 micros=2 sync={text}"
    try:
        whole = _play(source, plan, 2)
    except ConfigProblems as error:
        yield f"{plan}: {error.problems[0].what}"
        return
    if policy.repeats and any(other.stops != whole[0].stops for other in whole):
        yield "replicas hear of a request to stop in different steps"
    if policy.repeats and any(other.losses != whole[0].losses for other in whole):
        yield "replicas that meet report different losses"
    declared = policy.work(whole[0].weights.nbytes, 2).kept
    if policy.repeats and whole[0].kept != declared:
        yield f"it keeps {whole[0].kept} bytes between steps and declares {declared}"
    if not all(torch.equal(other.center, whole[0].center) for other in whole):
        yield 'replicas hold different weights for "the" weights of the run'
    if not whole[0].weights.isfinite().all():
        yield "weights are not finite"
    again = _play(source, plan, 2, kept=folder / "kept")
    if policy.repeats and not all(
        torch.equal(a.weights, b.weights) for a, b in zip(again, whole, strict=True)
    ):
        yield f"saved and loaded after {SAVED} steps, a run goes on otherwise"
    if policy.mails:
        yield from mail_faults(policy, text, source, _play(source, f"dp=2 sync={text}", 2)[0].weights)


def identity_faults(policy: Policy, source: Path) -> Iterator[str]:
    """A policy that is LOSSY declares identities, and they hold. source: a text."""
    if not policy.identities and policy.fidelity is Fidelity.LOSSY:
        yield "it declares no identity, by which it could be held to what it says (Policy.identities)"
    for identity in policy.identities:
        yield from _compared(source, identity)


def _compared(source: Path, identity: Identity) -> Iterator[str]:
    count = identity.replicas
    codec = f" codec={identity.codec}" if identity.codec else ""
    first = _play(source, f"dp={count} sync={identity.sync}{codec}", count, alike=identity.alike)
    if identity.alike:
        second = _play(source, f"dp=1 sync={identity.equals}", 1, batch=4 // count, alike=True)
    else:
        second = _play(source, f"dp={count} sync={identity.equals}", count)
    wanted = second[0].center
    off = max(float((play.center - wanted).norm() / wanted.norm()) for play in first)
    if not off <= NEAR:
        coded = f" with codec={identity.codec}" if identity.codec else ""
        same = ", with the same samples on all replicas," if identity.alike else ""
        yield f"{identity.sync}{coded} on {count} replicas{same} is off by {off:.1g} from {identity.equals}"


def _play(
    source: Path, plan: str, ranks: int, *, alike: bool = False, batch: int = 4, kept: Path | None = None
) -> list[OuterPlay]:
    return threads.run(ranks, lambda rank: _rank(source, plan, rank, ranks, alike, batch, kept))


def _rank(
    source: Path, text: str, rank: int, ranks: int, alike: bool, batch: int, kept: Path | None
) -> OuterPlay:
    """A short training on one rank with plain gradient descent; where `kept` is given, in two lives with a checkpoint
    between them. alike: every replica has the samples of the first, of a global batch of four."""
    recipe = recipe_of(source, batch)
    whole = recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch": 4})})
    resolved, read = (
        resolve(recipe, f"{text} precision=fp64", ranks),
        resolve(whole, "dp=1 precision=fp64", 1),
    )
    place, corpus = (
        place_of(rank, ranks, rank, "gloo", 60.0),
        load(resolved.recipe.data, resolved.recipe.model),
    )
    recorder = Recorder(rank)
    run = build(resolved.recipe, resolved.plan, place, corpus, recorder)
    feed, _ = feeds(read.recipe, read.plan, corpus, place.device)
    stops: list[bool] = []
    losses: list[float | None] = []
    while run.step < STEPS:
        step = run.step
        if kept is not None and step == SAVED:
            boxes = [*pieces_of(run, center=run.sync.center()), *kept_of(run)]
            saved = save(kept, step, boxes, {"step": step}, rank=rank, world=ranks, token="conformance")
            run = build(resolved.recipe, resolved.plan, place, corpus, recorder)
            restore(run, saved)
        share = run.of_leaves // run.mesh.dp.size
        leaves = range(share) if alike else run.leaves
        met = run.sync.meets(step)
        stop = partial(bool, step == ASKED and rank == ranks - 1)
        report = train_step(run, feed.fetch(step, leaves), stop=stop)
        stops.append(report.stop)
        losses.append(report.loss if met else None)
    center = {**weights_of(run), **{name: x.detach() for name, x in run.sync.center().items()}}
    copied = run.sync.copied if isinstance(run.sync, OuterSync) else ()
    held = sum(x.nbytes for x in (*run.sync.state().values(), *run.sync.outer.values(), *copied))
    return OuterPlay(stops, losses, flat(weights_of(run)), flat(center), held)

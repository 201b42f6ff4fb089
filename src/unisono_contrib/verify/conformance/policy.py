"""What every policy owes: replicas as alike and as near to one device as declared, its bytes, and its state."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems
from unisono.spec.fidelity import Fidelity
from unisono.sync import POLICIES, OuterPolicy, Policy
from unisono.train.build.build import Place, build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads
from unisono_contrib.verify.conformance.outer_policy import identity_faults, outer_faults

STEPS = 4  # at least
NEAR = 1e-9  # of weights in float64 after some steps, where only the order of sums differs


@dataclass(frozen=True, slots=True)
class _Trained:
    """Of one rank: losses, wishes and weights of every step; bytes that it sent in a mean one, keeps, adds up."""

    losses: list[float]
    stops: list[bool]
    weights: list[torch.Tensor]
    sent: float
    kept: int
    gradients: int


def faults(policy: Policy, folder: Path, text: str) -> Iterator[str]:
    """1. Identities hold, if it declares any. 2. Loss and request to stop are the same on all replicas. 3. So are
    weights, if it says `equal`. 4. They are as near to one device's as its fidelity says. 5. It sends and keeps what it
    declares. 6. A run that was saved and loaded goes on as one that was not. All under its `steady` self."""
    if isinstance(policy, OuterPolicy):
        yield from outer_faults(policy, folder, text)
        return
    steady = policy.steady(text)
    if steady != text:
        policy, text = POLICIES.read(steady), steady
    steps = -(-STEPS // policy.rhythm) * policy.rhythm  # whole periods
    source = folder / "text.txt"
    source.write_text("to be or not to be, that is the question: " * 40, encoding="utf-8")
    yield from identity_faults(policy, source)
    try:
        many = _world(source, f"dp=2 micros=2 sync={text}", 2, steps)
    except ConfigProblems as error:
        yield f"dp=2 micros=2 sync={text}: {error.problems[0].what}"
        return
    first = many[0]
    for rank, other in enumerate(many[1:], 1):
        if other.losses != first.losses:
            yield f"rank {rank} reports other losses than rank 0"
        if other.stops != first.stops:
            yield f"rank {rank} learns of a request to stop in another step than rank 0"
        if policy.equal and not _same(other.weights, first.weights):
            yield f"rank {rank} has other weights than rank 0, and it says `equal`"
    if not all(weights.isfinite().all() for weights in first.weights):
        yield "weights are not finite"
    (alone,) = _world(source, f"dp=1 micros=4 sync={text if policy.alone else 'every_step'}", 1, steps)
    if policy.fidelity is not Fidelity.LOSSY:
        for step, (mine, theirs) in enumerate(zip(first.weights, alone.weights, strict=True)):
            off = ((mine - theirs).norm() / theirs.norm()).item()
            if off > (NEAR if policy.fidelity is Fidelity.ROUNDING else 0.0):
                word = policy.fidelity.name
                yield f"after step {step} weights are off by {off:.1g} from one device's, and it says {word}"
                break
    work = policy.work(first.gradients, 2)
    off = first.sent - work.sent
    if (off if policy.lazy else abs(off)) > 0.01 * work.sent + 64:
        yield f"it sends {first.sent} bytes of gradients a step and declares {work.sent}"
    if work.kept != first.kept:
        yield f"it keeps {first.kept} bytes between steps and declares {work.kept}"
    again = _world(source, f"dp=2 micros=2 sync={text}", 2, steps, folder / "kept")
    if not all(_same(a.weights, b.weights) for a, b in zip(again, many, strict=True)):
        yield f"saved and loaded after {steps // 2} steps, a run goes on otherwise"


def _world(source: Path, plan: str, ranks: int, steps: int, kept: Path | None = None) -> list[_Trained]:
    return threads.run(ranks, lambda rank: _trained(source, plan, rank, ranks, steps, kept))


def _trained(source: Path, text: str, rank: int, ranks: int, steps: int, kept: Path | None) -> _Trained:
    """A short training on one rank; where `kept` is given, in two lives with a checkpoint between them."""
    recipe = Recipe(
        model=ModelConfig(n_layer=1, n_head=2, d_model=32, context=8),
        data=DataConfig(source=f"text:{source}"),
        train=TrainConfig(steps=steps, global_batch=4, micro_batch=1, dtype="float64", lr=1e-2),
    )
    resolved = resolve(recipe, f"{text} precision=fp64", ranks)
    place = place_of(rank, ranks, rank, "gloo", 60.0)
    live, recorder = _joined(resolved.recipe, resolved.plan, place)
    losses, stops, weights, sent = [], [], [], 0.0
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    for step in range(steps):
        if kept is not None and step == steps // 2:
            boxes = [*pieces_of(live), *kept_of(live)]
            folder = save(kept, live.step, boxes, {}, rank=rank, world=ranks, token="conformance")
            live, recorder = _joined(resolved.recipe, resolved.plan, place)
            restore(live, folder)
            live.step = step
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
        before = _sent(recorder)
        report = train_step(
            live, feed.fetch(step, live.leaves), stop=partial(bool, step == 2 and rank == ranks - 1)
        )
        beside = live.gradients.line.values.nbytes * (live.mesh.dp.size - 1)
        sent += (_sent(recorder) - before - beside) / steps
        losses.append(report.loss)
        stops.append(report.stop)
        weights.append(torch.cat([slot.master.detach().flatten() for slot in live.local.slots]).clone())
    held = sum(x.nbytes for x in live.sync.state().values())
    return _Trained(losses, stops, weights, sent, held, live.gradients.nbytes)


def _joined(recipe: Recipe, plan: Plan, place: Place) -> tuple[Run, Recorder]:
    recorder = Recorder(place.rank)
    return build(recipe, plan, place, load(recipe.data, recipe.model), recorder), recorder


def _sent(recorder: Recorder) -> int:
    """Bytes sent over dp so far."""
    return sum(nbytes for (axis, _), nbytes in recorder.bytes().items() if axis == "dp")


def _same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))

"""A recorded step once more, on one process, from the nearest checkpoint: does it give what the run wrote down?

Where the run's plan promises the bits of one process (canonical mode, stages alone), loss, norm and the tensors of the
next checkpoint must be the same bits. Elsewhere sums were taken in another order, and differences pass from step to
step through the weights. How far is measured, not guessed: a *twin* makes the same steps from the same state, and in
each of them all its gradients are pushed, element by element and by a random sign, as far as rounding may push them
(`bounds.bounds_of`). A number may differ by the bound of the step itself, plus lambda times as much as the twin's
differs: the twin is one draw of a random deviation, lambda the number of standard deviations that all bounds allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.config import Resolved
from unisono.observe.span import Recorder
from unisono.parallel.params import Slot, values_of
from unisono.plan import Plan
from unisono.plan.fidelity import beside_like, fidelity_of
from unisono.spec.fidelity import Fidelity
from unisono.train.build.build import Place, build, feeds
from unisono.train.data.dataset import Corpus
from unisono.train.data.filtered import FilteredFeed
from unisono.train.state.checkpoint import load, read_full
from unisono.train.state.run_state import pieces_of
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono.train.step.update import Report
from unisono.verify.bounds import Bounds, bounds_of
from unisono.verify.path import sizes_of


@dataclass(frozen=True, slots=True)
class Task:
    """What to replay. resolved: the run's recipe under a plan of one process. plan: the run's own. start: a checkpoint
    before `step`, None for the initial state. after: the checkpoint that step `step` led to, if it was kept.
    recorded: step → its line of metrics.jsonl."""

    resolved: Resolved
    plan: Plan
    step: int
    start: Path | None
    after: Path | None
    recorded: Mapping[int, Mapping[str, Any]]


@dataclass(slots=True)
class Findings:
    """errors: largest relative error of each kind. allowed: its bound where it was largest."""

    exact: bool
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    first: str | None = None
    identical: bool = True

    def number(self, kind: str, what: str, got: float, want: float, bound: float) -> None:
        """One recorded number."""
        scale = abs(want) or 1.0
        self._take(
            kind, what, abs(got - want) / scale, bound, f"{want!r} recorded, {got!r} replayed", got == want
        )

    def tensor(self, kind: str, name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        """One saved tensor; bound relative to its largest entry."""
        largest = want.double().abs().max().item() or 1.0
        gap = (got.double() - want.double()).abs()
        count = int((gap > bound * largest).sum())
        said = f"{count} of {gap.numel()} entries differ, by up to {gap.max().item() / largest:.1e} of the largest"
        self._take(kind, name, gap.max().item() / largest, bound, said, torch.equal(got, want))

    def _take(self, kind: str, what: str, error: float, bound: float, said: str, same: bool) -> None:
        error = error if math.isfinite(error) else 1e308
        self.identical &= same
        if error >= self.errors.get(kind, -1.0):
            self.errors[kind], self.allowed[kind] = error, bound
        if self.first is None and not (same if self.exact else error <= bound):
            self.first = f"{what}: {said}" + ("" if self.exact else f", bound {bound:.1e}")


@dataclass(slots=True)
class _Actor:
    """A run that makes the steps."""

    run: Run
    feed: FilteredFeed

    def step(self, line: Mapping[str, Any]) -> Report:
        """line: what was recorded of the step, with the leaves that were left out of it."""
        self.feed.leave_out(self.run.step, line.get("quarantined", ()))
        return train_step(self.run, self.feed.fetch(self.run.step, self.run.leaves))


def make_twin(run: Run, bounds: Bounds) -> Run:
    """The run itself, which from now on pushes all its gradients as far as rounding may push them."""
    measure, noise = run.measure, torch.Generator().manual_seed(0)

    def pushing(slots: Sequence[Slot], extra: torch.Tensor) -> list[float]:
        numbers = measure(slots, extra)
        _push(run, bounds, noise)
        return numbers

    run.measure = pushing
    return run


@torch.no_grad()
def _push(run: Run, bounds: Bounds, noise: torch.Generator) -> None:
    """Move each gradient element by its bound times its tensor's largest entry; a tensor of mere rounding by its bound
    times the model's largest."""
    held = {
        slot.name: values_of(grad)
        for slot in run.local.slots
        if (grad := slot.master.grad) is not None and not slot.alias
    }
    tops = {name: grad.abs().max().item() if grad.numel() else 0.0 for name, grad in held.items()}
    most = max(tops.values(), default=0.0)
    for name, grad in held.items():
        signs, bound = torch.randint(0, 2, grad.shape, generator=noise).to(grad) * 2 - 1, bounds.of(name)
        grad.add_(signs, alpha=bound * max(tops[name], bound * most))


def replay(task: Task, place: Place, corpus: Corpus) -> dict[str, Any]:
    """Re-execute all steps from the checkpoint to `task.step` on this process; the JSON object of the result."""
    exact = beside_like(task.plan) is Fidelity.EXACT
    bounds = bounds_of(task.plan, sizes_of(task.resolved, corpus))
    found = Findings(exact)
    actor = _started(task, place, corpus)
    begun = actor.run.step
    twin = None if exact else _started(task, place, corpus)
    if twin is not None:
        make_twin(twin.run, bounds)
    drift = {"loss": 0.0, "grad": 0.0}
    leaves = task.resolved.batch.leaves
    while actor.run.step < task.step and found.first is None:
        step = actor.run.step + 1
        line = task.recorded.get(step, {})
        if "skipped" in line:
            for one in filter(None, (actor, twin)):
                one.run.step = step
            continue
        report = actor.step(line)
        if twin is not None:
            other = twin.step(line)
            drift["loss"] = max(drift["loss"], _apart(other.loss, report.loss))
            drift["grad"] = max(drift["grad"], _apart(other.norm, report.norm))
        if line:
            _compare(found, step, report, line, bounds, drift, leaves)
        if actor.run.step < step:
            found.first = (
                found.first or f"step {step}: the loss or the norm is not a number, nothing was updated"
            )
            break
    if found.first is None and task.after is not None:
        _compare_state(found, actor.run, twin.run if twin is not None else None, task.after, bounds)
    return {
        "steps_replayed": actor.run.step - begun,
        "fidelity": fidelity_of(task.plan).name,
        "bit_identical": found.identical,
        "max_rel_err": {kind: found.errors.get(kind) for kind in ("loss", "grad", "param", "optim")},
        "bounds": {kind: found.allowed.get(kind) for kind in ("loss", "grad", "param", "optim")},
        "pass": found.first is None,
        "first_divergence": found.first,
    }


def _started(task: Task, place: Place, corpus: Corpus) -> _Actor:
    recipe, plan = task.resolved.recipe, task.resolved.plan
    run = build(recipe, plan, place, corpus, Recorder(place.rank))
    feed, _ = feeds(recipe, plan, corpus, place.device)
    if task.start is not None:
        state = load(task.start, pieces_of(run))
        run.step = int(state["step"])
    return _Actor(run, feed)


def _apart(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)


def _compare(
    found: Findings,
    step: int,
    report: Report,
    line: Mapping[str, Any],
    bounds: Bounds,
    drift: Mapping[str, float],
    leaves: int,
) -> None:
    if line.get("lr") is not None and not math.isclose(line["lr"], report.lr, rel_tol=1e-12):
        found.first = (
            f"step {step}: learning rate {line['lr']!r} recorded, {report.lr!r} replayed; the recipe of the run folder"
            " is not the one that made this step"
        )
        return
    for kind, key, got in (("loss", "loss", report.loss), ("grad", "grad_norm", report.norm)):
        want = line.get(key)
        if want is None:
            found.first = found.first or f"step {step}: the {key} was not a number when it was recorded"
            continue
        # The norm sums all elements of gradients that are each within their bound; the loss sums leaves.
        own = bounds.loss + bounds.total(leaves) if kind == "loss" else bounds.grad * bounds.spread
        found.number(kind, f"{key} of step {step}", got, want, own + bounds.spread * drift[kind])


def _compare_state(found: Findings, run: Run, twin: Run | None, folder: Path, bounds: Bounds) -> None:
    mine = {p.name: p.tensor.detach().cpu() for p in pieces_of(run) if p.saved}
    pushed: dict[str, torch.Tensor] = {}
    if twin is not None:
        pushed = {p.name: p.tensor.detach().cpu() for p in pieces_of(twin) if p.saved}
    for name, want in read_full(folder, list(mine)).items():
        if not want.numel():
            continue
        got = mine[name]
        allowed = 0.0
        if twin is not None:
            largest = want.double().abs().max().item() or 1.0
            gap = (pushed[name].double() - got.double()).abs().max().item()
            allowed = bounds.spread * (gap / largest + bounds.unit + bounds.kept * name.startswith("model/"))
        found.tensor("param" if name.startswith("model/") else "optim", name, got, want, allowed)

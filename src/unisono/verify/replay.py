"""`unisono verify --replay` inside its one process: a recorded step once more, from the nearest checkpoint.

Where the run's plan promises the bits of one process (canonical mode, stages alone), loss, norm and the tensors of the
next checkpoint must be the same bits. Elsewhere a twin of the replay says how far rounding may take them (`twin.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

# For its effect: reading a checkpoint draws this in late, and once in the helper is cheaper than in the rank.
import torch.distributed.checkpoint.planner_helpers

from unisono.config import Recipe, Resolved, resolve
from unisono.launch.context import RankContext
from unisono.launch.pace import margin
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.plan.fidelity import beside_like, fidelity_of, with_sections
from unisono.spec.fidelity import Fidelity
from unisono.train.build.build import Place, build, feeds, place_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.filtered import FilteredFeed
from unisono.train.data.load import load as load_data
from unisono.train.state.checkpoint import load, read_full, tensor_names
from unisono.train.state.checkpoint.find import first_whole, list_steps
from unisono.train.state.resume import check_fits
from unisono.train.state.run_state import numbers_of, pieces_of
from unisono.train.step.run import Run
from unisono.train.step.train_step import next_step
from unisono.train.step.update import Report
from unisono.verify.bounds import bounds_of
from unisono.verify.path import sizes_of
from unisono.verify.twin import RunTolerance, apart, gap, largest, make_twin, size_of_step

KINDS = ("loss", "grad", "param", "optim")


def prepare(argument: dict[str, Any]) -> Corpus:
    """In the fork server: the data."""
    recipe = Recipe.model_validate_json(argument["recipe"])
    return load_data(recipe.data, recipe.model)


def main(ctx: RankContext, argument: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
    """Choose the nearest whole checkpoint before the step, re-execute all steps from there, and compare."""
    resolved = resolve(Recipe.model_validate_json(argument["recipe"]), argument["alone"], 1)
    plan, last = Plan.parse(argument["plan"]), argument["step"]
    checkpoints = list_steps(Path(argument["run_dir"]))
    start, notes = first_whole(checkpoints[n] for n in sorted(checkpoints, reverse=True) if n < last)
    if start is not None:
        check_fits(load(start, []), resolved.recipe, corpus.fingerprint, start)
    ctx.channel.send("from", start=start.name if start is not None else "", notes=notes)
    recorded = {int(line["step"]): line for line in argument["recorded"]}
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, margin(resolved.recipe.launch.timeout))
    exact = with_sections(beside_like(plan), plan, resolved.recipe.sections()) is Fidelity.EXACT
    bounds = bounds_of(plan, replace(sizes_of(resolved, corpus), regrouped=not exact))
    comparison = _Comparison(RunTolerance(bounds, exact, resolved.batch.leaves))
    actor = _started(resolved, place, corpus, start)
    begun = actor.run.step
    twin = actor if exact else _started(resolved, place, corpus, start)
    if not exact:
        make_twin(twin.run, bounds)
    while actor.run.step < last and comparison.first is None:
        _compare_step(comparison, actor, twin, recorded.get(actor.run.step + 1, {}))
    after = checkpoints.get(last)  # if it was kept
    if comparison.first is None and after is not None:
        comparison.state(after, actor.tensors(), twin.tensors())
    return {
        "from": start.name if start is not None else "initial state",
        "compared_with": after.name if after is not None else None,
        "steps_replayed": actor.run.step - begun,
        "fidelity": with_sections(fidelity_of(plan), plan, resolved.recipe.sections()).name,
        "bit_identical": comparison.identical,
        "max_rel_err": {kind: comparison.errors.get(kind) for kind in KINDS},
        "bounds": {kind: comparison.allowed.get(kind) for kind in KINDS},
        "pass": comparison.first is None,
        "first_divergence": comparison.first,
    }


@dataclass(slots=True)
class _Replay:
    """A run that makes the steps again."""

    run: Run
    feed: FilteredFeed

    def step(self, line: Mapping[str, Any]) -> Report:
        """line: what was recorded of the step, with the leaves that were left out of it."""
        self.feed.leave_out(self.run.step, line.get("quarantined", ()))
        return next_step(self.run, self.feed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and optimiser state, by the names of a checkpoint."""
        return {p.name: p.tensor.detach().cpu() for p in pieces_of(self.run) if p.saved}


def _compare_step(comparison: "_Comparison", actor: _Replay, twin: _Replay, line: Mapping[str, Any]) -> None:
    """Make the next step and compare it with `line`, what was recorded of it; {} if nothing was."""
    step = actor.run.step + 1
    if "skipped" in line:
        actor.run.step = twin.run.step = step
        return
    sizes = actor.run.player.watch_sizes()
    report = actor.step(line)
    pushed = report if twin is actor else twin.step(line)
    if line:
        comparison.step(step, line, report, pushed, size_of_step(sizes))
    if actor.run.step < step:
        comparison.fail(f"step {step}: the loss or the norm is not a number, nothing was updated")


def _started(resolved: Resolved, place: Place, corpus: Corpus, start: Path | None) -> _Replay:
    """Return a run that stands at a checkpoint, None for the initial state."""
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(place.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device, kept=run.update.keeps)
    if start is not None:
        known = set(tensor_names(start))
        numbers = [box for box in numbers_of(run) if box.name in known]
        run.step = int(load(start, [*pieces_of(run), *numbers])["step"])
    return _Replay(run, feed)


@dataclass(slots=True)
class _Comparison:
    """The replay beside what was recorded. errors: largest relative error of each kind. allowed: its bound where it was
    largest. drift: how far the twin's loss and norm have been from the replay's."""

    tolerance: RunTolerance
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "grad": 0.0})
    first: str | None = None
    identical: bool = True

    def step(
        self, step: int, line: Mapping[str, Any], report: Report, pushed: Report, size: float = 0.0
    ) -> None:
        """The numbers of one step. pushed: the twin's. size: of the loss, see `twin.apart`."""
        if line.get("lr") is not None and not math.isclose(line["lr"], report.lr, rel_tol=1e-12):
            self.fail(
                f"step {step}: learning rate {line['lr']!r} recorded, {report.lr!r} replayed; the recipe of the run"
                " folder is not the one that made this step"
            )
            return
        for kind, key, got, twin, large in (
            ("loss", "loss", report.loss, pushed.loss, size),
            ("grad", "grad_norm", report.norm, pushed.norm, 0.0),
        ):
            self.drift[kind] = max(self.drift[kind], apart(twin, got, large))
            want = line.get(key)
            if want is None:
                self.fail(f"step {step}: the {key} was not a number when it was recorded")
                continue
            bound, text = (
                self.tolerance.number(kind, self.drift[kind]),
                f"{want!r} recorded, {got!r} replayed",
            )
            self._take(kind, f"{key} of step {step}", apart(got, want, large), bound, text, got == want)

    def state(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], pushed: Mapping[str, torch.Tensor]
    ) -> None:
        """The tensors of a checkpoint. pushed: the twin's."""
        for name, want in read_full(folder, list(tensors)).items():
            if not want.numel():
                continue
            got, top = tensors[name], largest(want)
            bound, error = self.tolerance.tensor(name, gap(pushed[name], got) / top), gap(got, want) / top
            count = int(((got.double() - want.double()).abs() > bound * top).sum())
            text = f"{count} of {got.numel()} entries differ, by up to {error:.1e} of the largest"
            kind = "param" if name.startswith("model/") else "optim"
            self._take(kind, name, error, bound, text, torch.equal(got, want))

    def fail(self, text: str) -> None:
        """Something is wrong whatever the bounds are; the first that was noticed stays."""
        self.first = self.first or text

    def _take(self, kind: str, what: str, error: float, bound: float, text: str, same: bool) -> None:
        error = error if math.isfinite(error) else 1e308
        self.identical &= same
        if error >= self.errors.get(kind, -1.0):
            self.errors[kind], self.allowed[kind] = error, bound
        if not (same if self.tolerance.exact else error <= bound):
            self.fail(f"{what}: {text}" + ("" if self.tolerance.exact else f", bound {bound:.1e}"))

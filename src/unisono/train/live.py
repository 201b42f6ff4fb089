"""A run under way on one rank, and what happens between its steps: telling, validating, saving, going back."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.observe.host_time import HostMeter
from unisono.spec.section import Section
from unisono.spec.sink import SINKS, Observer, RunFacts
from unisono.spec.training import METRICS
from unisono.train.build.build import observers_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.filtered import FilteredFeed
from unisono.train.rank_order import RankOrder
from unisono.train.recovery.drain import DrainParts
from unisono.train.recovery.snapshots import Snapshots
from unisono.train.rejoin import losses
from unisono.train.state import history
from unisono.train.state.cadence import Chosen, Clock, Fixed
from unisono.train.state.checkpoint.find import point_best, step_of
from unisono.train.state.run_state import kept_of, pieces_of
from unisono.train.state.saving import Saving
from unisono.train.state.validation_verdict import ValidationVerdict
from unisono.train.state.writing import writing
from unisono.train.step.evaluate import central_weights, evaluate
from unisono.train.step.played_model import PlayedModel, evaluated
from unisono.train.step.run import Run
from unisono.train.step.train_step import fetch
from unisono.train.step.update import Report
from unisono.train.watch.bad_steps import BadSteps
from unisono.train.watch.collections import StepCollections
from unisono.train.watch.journal import Journal, LiveTable
from unisono.train.watch.kernels import KernelLook
from unisono.train.watch.locate_nan import locate_nan
from unisono.train.watch.module_times import ModuleTimes


@dataclass(slots=True)
class Live:
    """A run with all that it has beside itself. Every rank has one and makes the same calls, or it hangs."""

    order: RankOrder
    run: Run
    corpus: Corpus
    feed: FilteredFeed
    val: Permuted
    bad: BadSteps
    saver: Saving
    snapshots: Snapshots
    check: Callable[[], None]  # that copies are equal, where the run is guarded
    targets: int  # of one step, over all ranks
    journal: Journal
    val_losses: list[tuple[int, float]]
    begun_from: Path | None  # the checkpoint
    saved: str  # the newest checkpoint, `checkpoints/step-000200`
    codec: str = ""  # what the policy said last that it chose
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    recent_losses: list[float] = field(
        default_factory=list
    )  # of as many of the last steps as a validation has batches
    judges: Sequence[tuple[Section, ModuleType]] = ()  # of validations
    best: int = 0  # step of the best validation, 0 before one
    enough: str = ""  # why the run ends here, before its last step
    gap: float | None = None  # of the last validation: its loss less the mean of those
    clock: Clock = field(default_factory=Clock)
    resized: bool = False  # whether a step of this start had another batch than the usual one
    trained: float = 0.0  # targets of the steps of this start
    written: int = 0  # steps of which the journal knows
    since: float = field(default_factory=time.perf_counter)  # when the step under way began
    cadence: Fixed | Chosen = field(default_factory=Fixed)
    host: HostMeter = field(default_factory=HostMeter)
    look: KernelLook = field(default_factory=lambda: KernelLook(False))
    modules: ModuleTimes | None = None
    collections: StepCollections | None = None

    def note(self, text: str) -> None:
        """Say something on the user's screen; rank 0 speaks for all."""
        note(self.order, text)

    def tell(self, report: Report, seconds: float) -> None:
        """Write down a step that has ended."""
        train, step = self.order.recipe.train, self.run.step
        assigner = self.run.assigner
        beside = {**self.run.sync.metrics(), **assigner.metrics(), **self.snapshots.take_stall()}
        samples = self.run.of_leaves * self.run.replica.micro_batch
        share = samples / self.run.replica.global_batch
        self.resized = self.resized or share != 1.0
        if self.resized:
            beside["effective_batch"] = samples
        report = replace(report, says={**report.says, **beside})
        self.tell_codec()
        if text := assigner.take_note():
            self.note(text)
        if not report.bad:
            self.recent_losses = [*self.recent_losses, report.loss][-train.eval_batches :]
        self.trained += self.targets * share
        if self.modules is not None:
            self.modules.stepped(self.run.step, seconds)
        if self.collections is not None:
            self.collections.stepped(self.run.step)
        lap = self.run.recorder.lap()
        lap = lap._replace(host=self._host(seconds))
        self.journal.add(report, lap, seconds, self._validates(train, step), share)
        self.written = step

    def _host(self, seconds: float) -> dict[str, Any]:
        """What the host did in the step that has just ended, and what was seen of its operations."""
        host: dict[str, Any] = self.host.lap(seconds)
        if kernels := self.look.take():
            host["kernels"] = kernels
        return host

    def tell_last(self) -> None:
        """Write down a step that was made, and whose replicas did not come together since one of them was lost."""
        if (report := self.run.untold) is not None:
            self.tell(report, time.perf_counter() - self.since)

    def tell_codec(self) -> None:
        """Say which codec the policy has chosen by measuring, when that is new."""
        if (codec := self.run.sync.says()) != self.codec:
            self.codec = codec
            self.note(f"codec: {codec}")

    def between(self, report: Report) -> None:
        """Validate and save where that falls between this step and the next."""
        train, step = self.order.recipe.train, self.run.step
        self.since = time.perf_counter()
        with self.run.gate:
            self._announce(self.saver.poll())
        if report.stop or step >= self.order.last_step:
            return
        if self._validates(train, step):
            self.validate()
        if not self.enough and (self.cadence.due(step) or self.best == step):
            self.save(blocking=not train.async_save)
        self.run.recorder.host_clock.ask()
        if self.modules is not None:
            self.modules.begin()
        self.run.recorder.lap()
        self.host.begin()

    @staticmethod
    def _validates(train: Any, step: int) -> bool:
        return step >= train.steps or bool(train.eval_every and step % train.eval_every == 0)

    def validate(self) -> None:
        """The loss and the metrics of some batches, if any are held out, and what a function of the user's says."""
        if self.val.samples or self.order.recipe.train.evaluate is not None:
            begun = time.perf_counter()
            with central_weights(self.run):
                self._validate()
            self.host.spent("eval_s", time.perf_counter() - begun)

    def _validate(self) -> None:
        train, values = self.order.recipe.train, dict[str, float]()
        if self.order.place.rank == 0:
            self.order.line.send("doing", text=f"validating, {train.eval_batches} batches")
        if self.val.samples:
            batches = [fetch(self.run, self.val, i) for i in range(train.eval_batches)]
            loss, self.metrics = evaluate(self.run, batches, [METRICS.read(text) for text in train.metrics])
            self.val_losses.append((self.run.step, loss))
            values["loss"] = loss
            if self.recent_losses:
                values["gap"] = self.gap = loss - math.fsum(self.recent_losses) / len(self.recent_losses)
        if train.evaluate is not None:
            self.metrics |= evaluated(train.evaluate, PlayedModel(self.run, self.corpus))
        values |= self.metrics
        self.journal.beside({f"val_{name}": value for name, value in values.items()})
        self.journal.validated(self.run.step, values)
        if self.order.place.rank == 0:
            self.order.line.send("val", step=self.run.step, **{"loss": None, **values})
        for section, live in self.judges:
            self.judged(live.judge(section, self.run, values))

    def judged(self, verdict: ValidationVerdict) -> None:
        """Heed what is thought of the last validation."""
        self.best, self.enough = verdict.best, verdict.enough

    def judge_again(self) -> None:
        """Heed what the run's state, filled anew, says of validations; `checkpoints/best` may name another step."""
        for section, judge in self.judges:
            self.judged(judge.judged(section, self.run))
        if self.judges and self.order.place.rank == 0:
            with writing(self.order.run_dir):
                point_best(self.order.run_dir, self.best)

    def save(self, blocking: bool, last: bool = False) -> Path | None:
        """Save a checkpoint; its folder, or None if it is not whole yet, or failed. last: it must not fail. What fails
        before is told, and the run goes on to the next."""
        order, run, begun = self.order, self.run, time.perf_counter()
        with run.gate:
            self.check()  # what is kept is what all replicas agree on
            with writing(order.run_dir):
                self.journal.flush()  # a run resumed from here makes no line again that is missing
            self._announce(self.saver.settle())
            pieces = [*pieces_of(run, center=run.sync.center()), *kept_of(run)]
            again = min(order.last_step, self.cadence.after(run.step))
            order.faults.reached("save")
            state = self._state()
            folder = self.saver.save(run.step, pieces, state, blocking=blocking, last=last, again=again)
            self._announce(folder)
        spent = time.perf_counter() - begun
        self.clock.saved(spent)
        self.host.spent("save_s", spent)
        if text := self.cadence.saved(run.step):
            self.note(text)
        return folder

    def _state(self) -> dict[str, Any]:
        """What checkpoints keep beside tensors."""
        return {
            "step": self.run.step,
            "data": {"fingerprint": self.corpus.fingerprint},
            "plan": str(self.order.plan),
            "last_bits": dict(self.order.last_bits),
            "val": [pair for pair in self.val_losses if math.isfinite(pair[1])],
            "recipe": self.order.recipe.model_dump(mode="json"),
            "cut_names": {name: list(names) for name, names in self.run.local.cut_names.items()},
            "bad": self.bad.state(),
        }

    def _announce(self, folder: Path | None) -> None:
        """Make a checkpoint known, from the moment that it is whole on disk, not before."""
        if folder is not None:
            self.saved = f"{folder.parent.name}/{folder.name}"
            self.journal.saved(step_of(folder) or 0, self.saved)
            if self.order.place.rank == 0:
                if self.best and step_of(folder) == self.best:
                    with writing(self.order.run_dir):
                        point_best(self.order.run_dir, self.best)
                self.order.line.send("saved", path=self.saved)

    def go_back(self, report: Report) -> bool:
        """Put the run back before a bad step, with what it wrote of the steps since; False where there is no
        checkpoint."""
        with self.run.gate:
            self._announce(self.saver.settle())
            self.snapshots.settle()
            if (state := self.bad.go_back(report)) is None:
                return False
            self.snapshots.turned_back()
            self.val_losses[:] = losses(state)
            self.recent_losses.clear()
            self.judge_again()
            with writing(self.order.run_dir):
                self.journal.close()
                self.journal = Journal(observers(self.order, self.run), self.targets, self.note)
            self.written = self.run.step
        self.run.recorder.lap()
        return True

    def give_up(self, report: Report) -> None:
        """End the run because of a bad step. Raises UserCodeError on one rank; the others wait to be stopped."""
        if report.finite or self.bad.tried:
            self.bad.give_up(report)
        leaves = self.feed.fetch(report.step, self.run.leaves)
        self._announce(self.saver.settle())
        error = locate_nan(self.run, leaves, report, self.order.place.rank, self.saved)
        if error is not None:
            raise error
        self.run.mesh.world.barrier()  # the rank to blame has raised; the supervisor stops the others here

    def drain_parts(self) -> DrainParts:
        """What saves within a step, should the grace be too short to finish it."""
        order, run = self.order, self.run

        def save() -> Path | None:
            if step_of(Path(self.saved)) != run.step:
                if not run.step:
                    return None
                self.journal.flush(must=True)
                self._announce(self.saver.beside(run.step, [*pieces_of(run), *kept_of(run)], self._state()))
            self.end()
            return order.run_dir / self.saved

        grace, store = order.recipe.launch.grace, order.store.clone() if order.line.hears else None
        settled = lambda: self.written == run.step
        return DrainParts(run, self.clock, order.line, store, order.place.world, grace, save, settled)

    def end(self) -> None:
        """Write down that this start ends in good order."""
        if self.order.place.rank == 0:
            with suppress(OSError):
                early = {"early": self.enough} if self.enough else {}
                history.note(self.order.run_dir, "end", step=self.run.step, **early)

    def stop_feeds(self) -> None:
        """No more batches are read."""
        self.feed.close()
        self.val.close()
        if self.collections is not None:
            self.collections.close()
            self.collections = None
        self.host.close()
        self.order.faults.pauses()


def note(order: RankOrder, text: str) -> None:
    """Say something on the user's screen; rank 0 speaks for all."""
    if order.place.rank == 0:
        order.line.send("note", text=text)


def observers(order: RankOrder, run: Run) -> list[Observer]:
    """The live table, the sinks that every run has, those of `out.track`, and what sections of the recipe bring."""
    recipe, place = order.recipe, order.place
    facts = RunFacts(
        order.run_dir, place.rank, place.world, order.host, place.backend, run.mesh.at, run.step, recipe.train.steps,
        run.recorder, run.mesh.dp.says(), recipe.model_dump(mode="json"), str(order.plan),
        lambda text: note(order, text), run,
    )  # fmt: skip
    traced = [f"trace:steps={recipe.train.trace_steps}"] if recipe.train.trace_steps else []
    if recipe.train.profile:
        traced.append("profile:first={}:last={}".format(*recipe.train.profile.split(":")))
    sinks = {sink.name: sink for sink in map(SINKS.read, ("metrics", "events", *traced, *recipe.out.track))}
    sections = observers_of(recipe, facts) if place.rank == 0 else []
    return [
        LiveTable(order.line, recipe.train.steps, run.mesh.at["pp"]),
        *(sink.open(facts) for sink in sinks.values() if sink.every_rank or place.rank == 0),
        *sections,
    ]

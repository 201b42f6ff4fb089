"""A run's checkpoints, evaluated on one device: what a run's own validation says, by a process beside it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from unisono import config
from unisono.config.resolve import resolve
from unisono.observe.metrics import JsonLines
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.spec.training import METRICS
from unisono.train.build.build import Place, build, feeds
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load
from unisono.train.export import checkpoint_of
from unisono.train.state.checkpoint import read_full
from unisono.train.state.checkpoint.find import latest, list_steps, step_of
from unisono.train.state.checkpoint.read import AVERAGE, parameters_of
from unisono.train.state.run_state import restore
from unisono.train.step.evaluate import evaluate, fill
from unisono.train.step.played_model import PlayedModel, evaluated
from unisono.train.step.run import Run
from unisono_contrib.train.calibration import Calibration, EnsembleCalibration

FILE = "evaluations.jsonl"
_LOOK = 0.5  # seconds between two looks into the folder


@dataclass(slots=True)
class RunEvaluator:
    """A run's model on this process, with the data that is held out."""

    run_dir: Path
    recipe: Any
    run: Run
    corpus: Corpus
    val: Permuted

    @classmethod
    def of(cls, run_dir: Path) -> "RunEvaluator":
        """Build the model of a run under `dp=1`. Raises UsageError as a run's start does; F03 without held-out data."""
        wanted = config.load(run_dir).recipe
        resolved = resolve(wanted, Plan(), 1)
        recipe, plan = resolved.recipe, resolved.plan
        corpus = load(recipe.data, recipe.model)
        place = Place(0, 1, torch.device("cpu"), "gloo", timedelta(seconds=600), scratch=run_dir)
        run = build(recipe, plan, place, corpus, Recorder(0), filled=False)
        _, val = feeds(recipe, plan, corpus, place.device)
        if not val.samples and recipe.train.evaluate is None:
            fix = "data.val_share above 0, or train.evaluate = FILE.py:FUNCTION"
            raise UsageError("nothing is held out to evaluate on", where=str(run_dir), fix=fix, code="F03")
        return cls(run_dir, recipe, run, corpus, val)

    def restore(self, checkpoint: Path, weights: str = "model") -> None:
        """Give the model the weights of a checkpoint; weights = "ema": their averages, where it has any. Raises
        UsageError."""
        restore(self.run, checkpoint)
        if weights == "ema":
            owners, names = self.run.local.owners, parameters_of(checkpoint, AVERAGE)
            averages = read_full(checkpoint, [AVERAGE + name for name in names])
            full = {slot.name: AVERAGE + owners.get(slot.name, slot.name) for slot in self.run.local.slots}
            fill(self.run, {name: averages[key] for name, key in full.items() if key in averages})

    def evaluate(self, checkpoint: Path, weights: str = "model") -> dict[str, Any]:
        """{"step", "val_loss" in nats per target, "val_NAME" of each metric} of a checkpoint. Raises UsageError."""
        self.restore(checkpoint, weights)
        train, values = self.recipe.train, dict[str, float]()
        if self.val.samples:
            batches = [self.val.fetch(i, self.run.leaves) for i in range(train.eval_batches)]
            values["loss"], metrics = evaluate(
                self.run, batches, [METRICS.read(text) for text in train.metrics]
            )
            values |= metrics
        if train.evaluate is not None:
            values |= evaluated(train.evaluate, PlayedModel(self.run, self.corpus))
        return {"step": self.run.step, **{f"val_{name}": value for name, value in values.items()}}


def evaluate_one(run_dir: Path, which: str = "latest", weights: str = "model") -> dict[str, Any]:
    """A checkpoint of a run, evaluated. which, weights: see `checkpoint_of`. Raises UsageError F03 where there is
    none."""
    folder = checkpoint_of(run_dir, which, weights)
    return {"checkpoint": str(folder), **RunEvaluator.of(run_dir).evaluate(folder, weights)}


def evaluate_ensemble(
    run_dirs: Sequence[Path], which: str = "latest", weights: str = "model"
) -> dict[str, Any]:
    """The newest, or best, checkpoints of several runs on the held-out samples of the first: calibration of each, and
    of their mean. Raises UsageError F03 where one has no checkpoint, K05 where they were trained on different
    data."""
    folders = [checkpoint_of(run_dir, which, weights) for run_dir in run_dirs]
    evaluators = [RunEvaluator.of(run_dir) for run_dir in run_dirs]
    first = evaluators[0]
    for other in evaluators[1:]:
        if other.corpus.fingerprint != first.corpus.fingerprint:
            raise UsageError(
                f"{first.run_dir} and {other.run_dir} were trained on different data", where=str(other.run_dir),
                likely="what is held out of the one may be in the other", fix="runs of the same data", code="K05",
            )  # fmt: skip
    for evaluator, folder in zip(evaluators, folders, strict=True):
        evaluator.restore(folder, weights)
    models = [PlayedModel(evaluator.run, evaluator.corpus) for evaluator in evaluators]
    sums = EnsembleCalibration([Calibration() for _ in models])
    for batch in range(first.recipe.train.eval_batches):
        for leaf in first.val.fetch(batch, first.run.leaves):
            if leaf.documents is not None:
                what = "samples of several documents are packed together, and members would see across them"
                raise UsageError(
                    what, where="data.packing", fix="--data.packing none in training", code="F03"
                )
            sums.add([model(leaf.inputs) for model in models], leaf.targets)
    members = [
        {"run_dir": str(evaluator.run_dir), "step": evaluator.run.step, **member.as_dict()}
        for evaluator, member in zip(evaluators, sums.members, strict=True)
    ]
    return {"members": members, "ensemble": sums.mean.as_dict()}


def follow(run_dir: Path, is_over: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Evaluate each checkpoint that a run saves, the newest first where several have come; ends after the last one of a
    run that is over. Each goes to `evaluations.jsonl` in the run folder; what is there already is not done again."""
    done, evaluator = _done(run_dir), None
    while True:
        over = is_over()  # before the look: what is saved after it is seen by the next
        folder = latest(run_dir)
        step = None if folder is None else step_of(folder)
        if folder is not None and step is not None and step not in done:
            evaluator = evaluator or RunEvaluator.of(run_dir)
            try:
                record = evaluator.evaluate(folder)
            except UsageError:
                if step in list_steps(run_dir):
                    raise
                continue  # the run has removed it meanwhile
            done.add(step)
            with JsonLines(run_dir / FILE) as lines:
                lines.write(record)
            yield record
        elif over:
            return
        else:
            time.sleep(_LOOK)


def _done(run_dir: Path) -> set[int]:
    """The steps that were evaluated before."""
    path = run_dir / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {json.loads(line)["step"] for line in lines if line.endswith("}")}

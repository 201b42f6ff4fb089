"""A teacher beside the model that learns: a trained model under the same plan, on the same ranks.

It is built by the same passes over the same mesh, so `tp`, `cp`, `ep` deal its layers and `shard` its weights, and each
rank reads the boxes that it holds. It has no gradients, no optimiser state, and nothing of it is in a checkpoint. Its
logits of a micro-batch are computed where and when the student's loss is: under `pp` all of it stands on the ranks of
the last stage.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.comm.device import has_numbers
from unisono.comm.mesh import Mesh
from unisono.config import ModelConfig
from unisono.models.build import build as build_model
from unisono.models.noise import Noise
from unisono.parallel.cut import Stage
from unisono.parallelize import Local, parallelize
from unisono.plan import Plan
from unisono.plan.fields import ALIKE
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, restored
from unisono.spec.runs import run_folder
from unisono.spec.training import Teaching
from unisono.train.build.pretrained import Beginning, layout_of
from unisono.train.foreign import open_weights
from unisono.train.state.checkpoint import latest, load
from unisono.train.step.join import timetable_of
from unisono_contrib.train.step.flow import unflushed

Values = Callable[[nn.Module], Callable[[str], Tensor]]


@dataclass(frozen=True, slots=True)
class TeacherSite:
    """What a teacher is built from beside itself: as the student was. values: of a model on a device without numbers,
    by name."""

    plan: Plan
    mesh: Mesh
    sample: Tensor
    dtype: torch.dtype
    device: torch.device
    facts: Facts
    values: Values


def teach(student: Local, teaching: Teaching, model: ModelConfig, site: TeacherSite) -> None:
    """Put the teacher that the recipe's loss names beside the student. Every rank calls it, or it hangs. model: the
    student's `[model]`.

    Raises UsageError: P10 under schedules that are never flushed, C03 and W01 where there is no teacher, W02 to W04
    where its weights do not fit, C10 where it knows other classes.
    """
    if unflushed(site.plan) is not None:
        what = "a teacher beside a pipeline that is never empty is not played"
        raise UsageError(what, where="plan.schedule, train.loss", fix="schedule=1f1b", code="P10")
    config, path = described(teaching.path, model)
    if not student.holds_loss:
        return
    plan = replace(site.plan, pp=1, schedule="1f1b", recompute="none", offload="none", blocks=ALIKE)
    timetable = replace(timetable_of(plan), placement=(site.mesh.at["pp"],))  # its one stage is here
    whole = build_model(config, site.facts)
    for parameter in whole.parameters():
        parameter.requires_grad_(False)
    weights_of = None
    if has_numbers(site.device):
        weights = open_weights(path)
        weights_of = Beginning(weights, layout_of(config, whole, weights), _nothing)
    teacher = parallelize(
        whole,
        plan,
        timetable,
        site.mesh,
        site.values(whole) if weights_of is None else None,
        site.sample,
        dtype=site.dtype,
        device=site.device,
    )
    if weights_of is not None:
        weights_of.fill(teacher.slots, teacher.owners)
    teacher.train(False)
    for stage in student.stages.values():
        if stage.last:
            _listen(stage, teacher.stages[0], teaching)


def described(said: str, student: ModelConfig) -> tuple[ModelConfig, Path]:
    """(the teacher's `[model]`, where its weights lie). said: a folder of transformers, or a run's. Raises UsageError
    C03."""
    path = Path(said)
    if said and (path / "config.json").is_file():
        fields = {"kind": f"hf:{said}", "context": student.window or None}
        return ModelConfig.model_validate({key: x for key, x in fields.items() if x is not None}), path
    if not said:
        fix = 'train.loss = "distil:teacher=RUN,weight=0.5"'
        raise UsageError("distil names no teacher", where="train.loss", fix=fix, code="C03")
    run = run_folder(path)
    folder = latest(run)
    if folder is None:
        fix = "a run that has saved a checkpoint"
        raise UsageError(f"the teacher has no checkpoint: {run}", where="train.loss", fix=fix, code="C03")
    saved = load(folder, [])["recipe"]
    if saved.get("train", {}).get("lora_rank"):
        fix = f"unisono export {run} --out FOLDER, which merges them, then teacher=FOLDER"
        raise UsageError("the teacher is a run with adapters", where="train.loss", fix=fix, code="C03")
    return restored(saved["model"]), folder


def _nothing(name: str) -> Tensor:
    raise KeyError(name)


def _listen(stage: Stage, teacher: Stage, teaching: Teaching) -> None:
    """From now on the stage's loss in training is the mixture with what the teacher makes of the same inputs; in
    evaluation it stays what it was."""
    usual, heard = stage.loss, list[tuple[Tensor, Noise | None]]()

    def note(inputs: Tensor, noise: Noise | None = None) -> None:
        heard[:] = [(inputs, noise)]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if not stage.training:
            return usual(logits, targets)
        inputs, noise = heard[0]
        calm = None if noise is None or noise.documents is None else replace(noise, seed=None, weight=0.0)
        with torch.no_grad():
            theirs = teacher.whole(teacher(inputs, calm))  # type: ignore[arg-type]
        ours = stage.whole(logits)
        if ours.shape != theirs.shape:
            what = f"the teacher's logits are {list(theirs.shape)}, the student's {list(ours.shape)}"
            raise UsageError(
                what, where="train.loss", fix="a teacher of the same vocabulary, or classes", code="C10"
            )
        return teaching.mix(ours, theirs, targets)

    if stage.first:  # its own inputs, whoever calls it
        stage.register_forward_pre_hook(lambda module, args: note(*args), prepend=True)
    else:
        stage.beside = note
    stage.loss = loss

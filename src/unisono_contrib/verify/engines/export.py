"""Inside a rank with torch: the steps of a proof as plain tensors, for engines that know nothing of ranks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unisono.config import Resolved
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import rotate
from unisono.observe.files import write_whole
from unisono.spec.errors import UsageError
from unisono.train.build.build import facts_of, feeds, model_of
from unisono.train.data.dataset import Corpus
from unisono.verify.play import record_of
from unisono.verify.record import Record

_TRAIN = ("optimizer", "clip", "weight_decay", "betas", "eps", "momentum")


def export_plan(resolved: Resolved, corpus: Corpus, job: Mapping[str, Any]) -> None:
    """The recorded steps of a plan. job: of the prover; `shelf` is where they go."""
    out = Path(job["shelf"])
    _export_steps(resolved, corpus, job, out)
    write_whole(out / "question", Path(job["reference"]).name)


def export_question(resolved: Resolved, corpus: Corpus, job: Mapping[str, Any]) -> None:
    """The recorded steps of the one device, with samples, constants and settings. Raises UsageError V07 for samples
    that no engine but torch knows."""
    if not isinstance(resolved.recipe.model, GPTConfig):
        raise TypeError(f"a model of kind {resolved.recipe.model.kind} was not refused")
    model, out, steps = resolved.recipe.model.with_vocab(facts_of(corpus)), Path(job["shelf"]), job["steps"]
    _export_steps(resolved, corpus, job, out)
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, torch.device("cpu"))
    cos, sin = _turns(model)
    for step in range(steps):
        leaves = feed.fetch(step, range(feed.count(step)))
        if any(x.documents is not None or x.scale != 1.0 or bool((x.targets < 0).any()) for x in leaves):
            what = "windows of several documents, or targets that do not count, are torch's alone"
            raise UsageError(what, where="data", fix="data.packing stream, or no other engine", code="V07")
        batch = {"inputs": [x.inputs for x in leaves], "targets": [x.targets for x in leaves]}
        tensors = {key: torch.cat(parts) for key, parts in batch.items()} | {"cos": cos, "sin": sin}
        save_file(tensors, out / f"batch-{step}.safetensors")
    train = {key: getattr(resolved.recipe.train, key) for key in _TRAIN}
    sizes = model.model_dump() | {"kv_heads": model.kv_heads, "ff_width": model.ff_width}
    about = {"steps": steps, "micro_batch": resolved.batch.micro_batch, "model": sizes, "train": train}
    write_whole(out / "about.json", json.dumps(about))


def _export_steps(resolved: Resolved, corpus: Corpus, job: Mapping[str, Any], out: Path) -> None:
    """Whole tensors by their names; of tied weights the owner's. What a wrong plan did not record is not there."""
    aliases = dict(model_of(resolved.recipe, corpus).anatomy.ties)  # type: ignore[union-attr]
    out.mkdir(parents=True, exist_ok=True)
    for step in range(job["steps"]):
        record = Record(record_of(Path(job["folder"]), step))
        numbers = {key: getattr(record.notes[0], key) for key in ("loss", "norm", "lr")}
        tensors = {key: torch.tensor([x], dtype=torch.float64) for key, x in numbers.items()}
        for key in record.parts:
            whole = record.whole(key)
            if whole is not None and key.split("/")[1] not in aliases:
                tensors[key] = whole.contiguous()
        save_file(tensors, out / f"step-{step}.safetensors")


def _turns(model: GPTConfig) -> tuple[Tensor, Tensor]:
    """The cosines and sines by which rotary positions turn, [T, K/2]: float32 numbers, of the model as weights are.
    They are what a pair (1, 0) is turned to."""
    each = model.d_model // model.n_head
    steps = torch.arange(model.context)
    pairs = torch.cat((torch.ones(model.context, each // 2), torch.zeros(model.context, each // 2)), -1)
    turned = rotate(pairs.double(), model.rope_theta, steps)
    return turned[:, : each // 2].contiguous(), turned[:, each // 2 :].contiguous()

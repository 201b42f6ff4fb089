"""`unisono export RUN`: the weights of a run's checkpoint for other programs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.config import DataConfig, ModelConfig
from unisono.models.folder import not_written
from unisono.observe.files import filled
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.model import restored
from unisono.spec.source import SOURCES
from unisono.train.export.card import write_card
from unisono.train.export.own import write_own
from unisono.train.export.stored import StoredWeights
from unisono.train.state.checkpoint import latest, load
from unisono.train.state.checkpoint.find import best
from unisono.train.state.checkpoint.read import AVERAGE, parameters_of

# Of the sister package.
_ADAPTER, _COMPRESS, _DCP, _GRAPH = (
    f"unisono.train.export.{name}" for name in ("adapter", "compress", "dcp", "graph")
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export starts from. state: the checkpoint's own. data: as in the recipe of the run."""

    run: Path
    folder: Path
    state: Mapping[str, Any]
    model: ModelConfig
    data: DataConfig
    weights: StoredWeights
    prune: str | None = None
    quantise: str | None = None

    @property
    def tokenizer(self) -> str | None:
        """Bytes need no file to be known, those of a folder lie there; other vocabularies belong to their data."""
        said = self.data.tokenizer
        known = said.startswith("hf:") or (said == "byte" and SOURCES.read(self.data.source).worded)
        return said if known else None


def _as_folder(what: Exported, out: Path) -> dict[str, Any]:
    compress = contributed(_COMPRESS) if what.prune or what.quantise else None
    weights = what.weights
    if compress and what.prune:
        weights = compress.Pruned(weights, compress.share_of(what.prune))
    written = what.model.export(weights, out, what.tokenizer)
    files = [*written["files"], write_card(out, what.run, what.state, what.model)]
    if compress is None:
        return {**written, "files": sorted(files)}
    origin = files, what.state["recipe"], what.model, what.data, what.weights
    compressed = compress.shrink(out, *origin, what.prune, what.quantise)
    files = {*files, *compressed.pop("files", ())}
    files = [name for name in files if (out / name).is_file()]
    return {**written, "files": sorted(files), "compressed": compressed}


TARGETS: Mapping[str, Callable[[Exported, Path], dict[str, Any]]] = {
    "hf": _as_folder,
    "adapter": lambda what, out: contributed(_ADAPTER).write_adapter(out, what.model, what.weights),
    "onnx": lambda what, out: contributed(_GRAPH).write_onnx(out, what.model, what.data, what.weights),
    "torch": lambda what, out: contributed(_GRAPH).write_program(out, what.model, what.data, what.weights),
    "weights": lambda what, out: write_own(out, what.model, what.data, what.weights, what.state),
}

# Of a folder for transformers, in each of its forms: what an export does not write anew goes, else both would be there.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "quantised.*")


def run(
    run_dir: str | Path,
    to: str = "hf",
    out: str | Path | None = None,
    dtype: str | None = None,
    prune: str | None = None,
    quantise: str | None = None,
    which: str = "latest",
    weights: str = "model",
) -> dict[str, Any]:
    """Write the weights of the run's latest checkpoint, or of its best one, into `out` (RUN/export-TO, or more).

    to: "hf", a folder as `transformers` loads it, adapters merged; "adapter", the adapters alone as `peft` loads them;
    "onnx"; "torch", a program of `torch.export`; "weights", a state_dict under the model's own names; "dcp", that with
    optimiser state and step, as a loop with FSDP2 loads them, also of a job's folder.
    dtype: of the weights; as trained when None. which, weights: see `checkpoint_of`.
    prune: a share, "0.5", or "2:4"; quantise: "int8" or "int4": of "hf" alone, see `compress`.
    Returns run_dir, checkpoint, step, to, out and what was written. Raises UsageError: F01 no layout fits, F02 not
    writable, F03 no checkpoint, F04 unknown target, F06 no adapters, F07 no graph, F08 nothing to compress so, E01 a
    library is missing, K01 damaged.
    """
    if to not in (*TARGETS, "dcp"):
        fix = " or ".join(f"--to {name}" for name in (*TARGETS, "dcp"))
        raise UsageError(f"unknown target {to!r}", code="F04", where="--to", fix=fix)
    compress = contributed(_COMPRESS) if prune or quantise else None
    if compress:
        compress.check(to, prune, quantise)
    folder = checkpoint_of(Path(run_dir), which, weights)
    state = load(folder, [])
    if to == "dcp":
        if dtype or weights == "ema":
            what = "a state to go on from has the weights as they were trained"
            raise UsageError(what, code="F04", where="--to dcp", fix="neither --dtype nor --weights ema")
        write = partial(contributed(_DCP).write_dcp, folder)
    else:
        write = partial(
            TARGETS[to], _exported(Path(run_dir), folder, state, to, dtype, prune, quantise, weights)
        )
    target = Path(out) if out else Path(run_dir) / f"export-{to}{ending(prune, quantise, weights)}"
    try:
        with filled(target, _WEIGHTS if to == "hf" else ()) as aside:
            written = write(aside)
    except (OSError, UsageError) as error:
        cause = error.__cause__ if isinstance(error, UsageError) else error
        if not isinstance(cause, OSError):
            raise
        raise not_written(target, cause) from cause
    return {
        "schema_version": 1,
        "run_dir": str(run_dir),
        "checkpoint": str(folder),
        "step": state["step"],
        "to": to,
        "out": str(target),
        **written,
    }


def _exported(
    run_dir: Path,
    folder: Path,
    state: Mapping[str, Any],
    to: str,
    dtype: str | None,
    prune: str | None,
    quantise: str | None,
    weights: str,
) -> Exported:
    if "recipe" not in state:
        raise UsageError(
            f"{folder} is of a loop of your own, whose model no recipe describes",
            code="F01",
            where=f"--to {to}",
            fix="--to dcp, or job.weights() in the script",
        )
    recipe = state["recipe"]
    model = restored(recipe["model"])
    data = DataConfig.model_validate_json(json.dumps(recipe["data"]))
    if to == "hf":
        model.layout()  # before gigabytes are read
    train = recipe.get("train", {})
    rank, alpha = train.get("lora_rank") or 0, train.get("lora_alpha")
    scale = (2.0 if alpha is None else alpha / rank) if rank else 1.0
    stored = StoredWeights(folder, scale, getattr(torch, dtype) if dtype else None, averaged=weights == "ema")
    if prune or quantise:
        contributed(_COMPRESS).check_dtype(quantise, stored.dtype)
    return Exported(run_dir, folder, state, model, data, stored, prune, quantise)


def ending(prune: str | None, quantise: str | None, weights: str = "model") -> str:
    """The end of the folder's name where nobody gives one, such as "-pruned-int8"."""
    return (
        ("-ema" if weights == "ema" else "")
        + ("-pruned" if prune else "")
        + (f"-{quantise}" if quantise else "")
    )


def checkpoint_of(run_dir: Path, which: str = "latest", weights: str = "model") -> Path:
    """The run's latest checkpoint; which = "best": that of its best validation. weights = "ema": it is to have the
    average of the weights. Raises UsageError F03."""
    folder = best(run_dir) if which == "best" else latest(run_dir)
    if folder is not None and folder.is_dir():
        if weights == "ema" and not parameters_of(folder, AVERAGE):
            raise UsageError(
                f"no average of weights in {folder}",
                code="F03",
                where=f"{run_dir}, --weights",
                likely="the run was trained without [ema], which keeps it",
                fix="leave --weights out for the weights themselves",
            )
        return folder
    if which == "best" and latest(run_dir) is not None:
        raise UsageError(
            f"no best checkpoint in {run_dir}",
            code="F03",
            where=f"{run_dir}, --which",
            likely="the run was trained without [early_stopping], which keeps it",
            fix="leave --which out for the newest one",
        )
    raise UsageError(
        f"no checkpoint in {run_dir}",
        code="F03",
        where=str(run_dir),
        likely="the run was stopped before its first checkpoint",
        fix=f"unisono train --resume {run_dir}, then this again",
    )

"""`unisono export RUN --to hf`: the weights of a run's checkpoint for other programs."""

import json
from pathlib import Path
from typing import Any

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.spec.model import restored
from unisono.spec.source import SOURCES
from unisono.train.checkpoint import latest, load, read_full, tensor_names

_PREFIX = "model/"


def run(
    run_dir: str | Path,
    to: str = "hf",
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Write the weights of the run's latest checkpoint into `out` (RUN/export-hf), as `transformers` loads them.

    Returns run_dir, checkpoint, step, to, out and what the model's kind tells. Raises UsageError: F01 no layout fits,
    F02 not writable, F03 no checkpoint, F04 unknown target, K01 damaged.
    """
    if to != "hf":
        raise UsageError(f"unknown target {to!r}", code="F04", where="--to", fix="--to hf")
    folder = checkpoint_of(Path(run_dir))
    state = load(folder, [])
    recipe = state["recipe"]
    model = restored(recipe["model"])
    data = DataConfig.model_validate_json(json.dumps(recipe["data"]))
    model.layout()  # before gigabytes are read
    names = [name for name in tensor_names(folder) if name.startswith(_PREFIX)]
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in read_full(folder, names).items()}
    target = Path(out) if out else Path(run_dir) / "export-hf"
    written = model.export(tensors, target, _tokenizer(data))
    return {
        "schema_version": 1,
        "run_dir": str(run_dir),
        "checkpoint": str(folder),
        "step": state["step"],
        "to": to,
        "out": str(target),
        **written,
    }


def checkpoint_of(run_dir: Path) -> Path:
    """The run's latest checkpoint. Raises UsageError F03."""
    folder = latest(run_dir)
    if folder is not None and folder.is_dir():
        return folder
    raise UsageError(
        f"no checkpoint in {run_dir}",
        code="F03",
        where=str(run_dir),
        likely="the run was stopped before its first checkpoint",
        fix=f"unisono train --resume {run_dir}, then this again",
    )


def _tokenizer(data: DataConfig) -> str | None:
    """Bytes need no file to be known; other vocabularies belong to their data."""
    return "byte" if data.tokenizer == "byte" and SOURCES.read(data.source).worded else None

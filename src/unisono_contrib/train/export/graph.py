"""A trained model as one graph, for programs that know nothing of ours: ONNX, or a program of `torch.export`."""

import io
import json
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import DataConfig, ModelConfig
from unisono.models.build import build as build_model
from unisono.observe.files import write_all
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy
from unisono.spec.model import Facts
from unisono.train.build.build import facts_of
from unisono.train.data.load import load as load_data
from unisono.train.export.stored import StoredWeights


class Scores(nn.Module):
    """The whole model without noise: `inputs [batch, ...] → logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def write_onnx(out: Path, config: ModelConfig, data: DataConfig, weights: StoredWeights) -> dict[str, Any]:
    """`model.onnx`, with `inputs` and `logits`; the batch may be of any size. Raises UsageError E01, F07; OSError."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"an export to ONNX needs {error.name}",
            code="E01",
            where="--to onnx",
            fix="pip install 'unisono[onnx]'",
        ) from None
    program, inputs = _program(config, data, weights)
    exported = torch.onnx.export(
        program, input_names=["inputs"], output_names=["logits"], dynamo=True, verbose=False
    )
    if exported is None:
        raise no_graph("torch.onnx made nothing of it")
    path = out / "model.onnx"
    exported.save(path, external_data=_bytes(weights) > 1 << 30)  # a protobuf holds 2 GiB at most
    return _about(out, [file.name for file in sorted(out.glob("model.onnx*"))], inputs, config)


def write_program(out: Path, config: ModelConfig, data: DataConfig, weights: StoredWeights) -> dict[str, Any]:
    """`model.pt2`, for `torch.export.load(...).module()(inputs)`. Raises UsageError F07; OSError."""
    program, inputs = _program(config, data, weights)
    with (out / "model.pt2").open("wb", buffering=0) as file:
        kept = PatientFile(file)
        torch.export.save(program, kept)  # type: ignore[arg-type]
        if kept.error is not None:
            raise kept.error
    return _about(out, ["model.pt2"], inputs, config)


class PatientFile(io.RawIOBase):
    """A file that takes whatever is written, and keeps the error of the first write that failed: torch ends the process
    where a write raises."""

    def __init__(self, file: FileIO) -> None:
        super().__init__()
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                write_all(self.file.fileno(), view)
            except OSError as error:
                self.error = error
        return view.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)


def no_graph(why: str) -> UsageError:
    """F07."""
    return UsageError(
        f"this model makes no graph: {why}",
        code="F07",
        where="model.kind",
        likely="its forward asks for values of tensors, or for something that torch.export does not know",
        fix="--to hf, or a forward that torch.export can follow",
    )


def whole_model(config: ModelConfig, data: DataConfig, weights: StoredWeights) -> tuple[nn.Module, Tensor]:
    """(the uncut model with the checkpoint's weights, inputs of two samples)."""
    if config.reads == "tokens":
        table = weights.shapes.get("stem.tok.weight")
        facts = Facts(vocab=table[0] if table else None)
        inputs = torch.zeros(2, config.window, dtype=torch.int64)
    else:
        corpus = load_data(data, config)
        facts = facts_of(corpus)
        inputs = torch.zeros(2, *(corpus.sample_shape or ()), dtype=torch.float32)
    model = build_model(config, facts)
    anatomy: Anatomy = model.anatomy  # type: ignore[assignment]
    owners = dict(anatomy.ties)
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        module, _, leaf = name.rpartition(".")
        if name not in owners:
            setattr(model.get_submodule(module), leaf, nn.Parameter(weights[name]))
    for alias, owner in owners.items():
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    kept = dict(model.named_buffers())
    for name in weights.stored.keys() & kept.keys():
        kept[name].data = weights[name]
    inputs = inputs if inputs.dtype == torch.int64 else inputs.to(weights.dtype)
    return model.eval(), inputs


@torch.no_grad()
def _program(
    config: ModelConfig, data: DataConfig, weights: StoredWeights
) -> tuple[torch.export.ExportedProgram, Tensor]:
    model, inputs = whole_model(config, data, weights)
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    try:
        return torch.export.export(Scores(model), (inputs,), dynamic_shapes=({0: batch},)), inputs
    except Exception as error:  # whatever tracing meets in a model that it cannot follow
        raise no_graph(str(error).strip().partition("\n")[0]) from error


def _bytes(weights: StoredWeights) -> int:
    width = (weights.dtype or torch.float32).itemsize
    return sum(torch.Size(shape).numel() * width for shape in weights.shapes.values())


def _about(out: Path, files: list[str], inputs: Tensor, config: ModelConfig) -> dict[str, Any]:
    about = {
        "inputs": ["batch", *inputs.shape[1:]],
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "kind": config.kind,
    }
    (out / "inputs.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return {"files": [*files, "inputs.json"], **about}

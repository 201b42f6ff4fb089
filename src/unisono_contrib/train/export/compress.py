"""A folder for use: matrices of blocks with zeros in them, or in 8 or 4 bits, and what that costs in loss.

Pruning zeroes the elements of least magnitude of each matrix (Han et al., 2015), or two of each four along its inputs
(2:4; Mishra et al., 2021). Quantisation is torchao's, of weights alone: a scale for each output, or at 4 bits for each
32 inputs of one. Nothing learns after it. The loss behind it is that of the files as they lie there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import DataConfig, ModelConfig
from unisono.models.build import build as build_model
from unisono.models.folder import open_folder
from unisono.models.hf.names import Layout
from unisono.models.noise import Noise
from unisono.models.weights import Weights, read_box, shapes_there
from unisono.parallel.player import noise_of
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts
from unisono.spec.quiet import importing
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load as load_data
from unisono.train.export.stored import StoredWeights
from unisono_contrib.train.export.adapter import layout_for
from unisono_contrib.train.export.graph import whole_model
from unisono_contrib.train.export.quantised import BITS, quantise_folder, quantised_weights

PATTERN = "2:4"


@dataclass(frozen=True, slots=True)
class Pruned(Mapping[str, Tensor]):
    """The weights with zeros in the matrices of the blocks. share: of each matrix; None: two of each four inputs."""

    inner: StoredWeights
    share: float | None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors."""
        return self.inner.shapes

    @property
    def dtype(self) -> torch.dtype | None:
        """In which they are given."""
        return self.inner.dtype

    def __getitem__(self, name: str) -> Tensor:
        whole = self.inner[name]
        if not is_matrix(name, tuple(whole.shape)):
            return whole
        return pruned(whole, self.share)

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight, by our name of it, is a matrix of a block, or a stack of some."""
    return name.startswith("blocks.") and len(shape) > 1


def pruned(matrix: Tensor, share: float | None) -> Tensor:
    """matrix [..., outputs, inputs] with the `share` of its elements that is least set to zero; with None, the two
    least of each four inputs. Of equal ones the first go. Raises UsageError F08 where fours do not fill a row."""
    if share is None:
        if matrix.shape[-1] % 4:
            raise UsageError(
                f"{PATTERN} takes inputs in fours, and a matrix here has {matrix.shape[-1]}",
                code="F08",
                where="--prune",
                fix="--prune 0.5",
            )
        fours = matrix.unflatten(-1, (-1, 4))
        least = fours.abs().argsort(dim=-1, stable=True)[..., :2]
        return fours.scatter(-1, least, 0.0).flatten(-2)
    rows = matrix.reshape(-1) if matrix.dim() == 2 else matrix.flatten(1)
    count = round(share * rows.shape[-1])
    least = rows.abs().argsort(dim=-1, stable=True)[..., :count]
    return rows.scatter(-1, least, 0.0).view(matrix.shape)


def share_of(prune: str) -> float | None:
    """Of `--prune`: a share of 0 to 1, or None for 2:4. Raises UsageError F08."""
    if prune == PATTERN:
        return None
    try:
        share = float(prune)
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        raise UsageError(
            f"nothing can be pruned by {prune!r}",
            code="F08",
            where="--prune",
            fix=f"a share between 0 and 1, such as 0.5, or {PATTERN}",
        )
    return share


def check(to: str, prune: str | None, quantise: str | None) -> None:
    """Raises UsageError F08 where this cannot be asked, E01 where torchao is missing."""
    if to != "hf":
        raise UsageError(
            f"--to {to} is not compressed", code="F08", where="--prune, --quantise", fix="--to hf"
        )
    if prune:
        share_of(prune)
    if quantise and quantise not in BITS:
        raise UsageError(
            f"unknown numbers {quantise!r}", code="F08", where="--quantise", fix=" or ".join(BITS)
        )
    if quantise:
        try:
            with importing():
                import torchao  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"--quantise needs {error.name}",
                code="E01",
                where="--quantise",
                fix="pip install 'unisono[quant]'",
            ) from None


def check_dtype(quantise: str | None, dtype: torch.dtype | None) -> None:
    """Raises UsageError F08 where torchao makes no numbers of these."""
    if quantise and dtype == torch.float64:
        raise UsageError(
            "weights of float64 are not quantised",
            code="F08",
            where="--quantise, train.dtype",
            fix="--dtype float32",
        )


def shrink(
    out: Path,
    written: Sequence[str],
    recipe: Mapping[str, Any],
    config: ModelConfig,
    data: DataConfig,
    weights: StoredWeights,
    prune: str | None,
    quantise: str | None,
) -> dict[str, Any]:
    """Of the folder `out`, written with the weights already pruned: its numbers of 8 or 4 bits in the place of its
    own, and what all of this costs.

    written: the folder's files. recipe: the run's, as its checkpoint holds it.
    Returns bytes (before, after, of weights on the disk), loss (before, after: nats per target on the validation data;
    None where none is held out), matrices, zeros (their share of the elements of the matrices), and files.
    """
    layout = files_layout(config, weights)
    elements = sum(math.prod(shape) for shape in weights.shapes.values())
    before = elements * (weights.dtype or torch.float32).itemsize
    files = {}
    if quantise:
        files = quantise_folder(out, layout, quantise, shapes_there(layout_for(config, weights)).keys())
    disk: Weights = quantised_weights(out) if quantise else open_folder(out)
    model, _ = whole_model(config, data, weights)
    batches = _batches(recipe, config, data, weights.dtype)
    losses: list[float | None] = [_loss(model, batches)]
    zeros = matrices = numbers = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            read_box(layout[name], disk, (0,) * parameter.dim(), parameter)
            if is_matrix(name, tuple(parameter.shape)):
                matrices += 1
                numbers += parameter.numel()
                zeros += int((parameter == 0).sum())
    losses.append(_loss(model, batches))
    names = files.get("files") or written
    held = sum((out / name).stat().st_size for name in names if name.endswith(".safetensors"))
    return {
        **({"prune": prune} if prune else {}),
        **({"quantise": quantise} if quantise else {}),
        "bytes": {"before": before, "after": held},
        "loss": {"before": losses[0], "after": losses[1]},
        "matrices": matrices,
        "zeros": zeros / max(1, numbers),
        **files,
    }


def files_layout(config: ModelConfig, weights: StoredWeights) -> Layout:
    """How a folder that was written of these weights holds them."""
    if (layout := config.layouts(weights.shapes).get(config.layout())) is not None:
        return layout
    return build_model(config, Facts()).names.files  # type: ignore[union-attr,return-value]


def _batches(
    recipe: Mapping[str, Any], config: ModelConfig, data: DataConfig, dtype: torch.dtype | None
) -> list[Any]:
    """The leaves on which the run validates."""
    train, corpus = recipe["train"], load_data(data, config)
    batch, micro = train["global_batch"], train["micro_batch"] or 1
    seed, said = recipe["seed"] + 1, data.source
    feed = Permuted(corpus.val, seed, batch, micro, dtype=dtype, origin=said, repeat=True, prefetch=False)
    if not feed.samples:
        return []
    every = range(batch // micro)
    return [leaf for i in range(train["eval_batches"]) for leaf in feed.fetch(i, every)]


@torch.no_grad()
def _loss(model: nn.Module, batches: list[Any]) -> float | None:
    """Nats per target that counts."""
    if not batches:
        return None
    loss = count = 0.0
    for leaf in batches:
        noise: Noise | None = noise_of(leaf, None)
        x = model.stem(leaf.inputs, noise)  # type: ignore[operator]
        for block in model.blocks:  # type: ignore[union-attr]
            x = block(x, noise)  # type: ignore[operator]
        logits = model.head(x)  # type: ignore[operator]
        # Of bf16, two digits would be seen.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss += float(model.loss(wide, leaf.targets))  # type: ignore[operator]
        count += leaf.targets.numel() / leaf.scale
    return loss / count


def summary(compressed: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people."""
    size, loss = compressed["bytes"], compressed["loss"]
    ratio = size["before"] / max(1, size["after"])
    yield f"weights {size['before']:,} to {size['after']:,} bytes, {ratio:.2f} times smaller"
    yield f"{compressed['zeros']:.1%} of the elements of {compressed['matrices']} matrices are zero"
    if loss["before"] is not None:
        yield f"validation loss {loss['before']:.4f} before, {loss['after']:.4f} after"

"""`unisono sample` of a diffusion transformer: pictures from noise, by Euler's steps along the learnt flow."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from unisono.models.noise import Noise
from unisono.observe.files import write_whole
from unisono.train.build.build import facts_of
from unisono.train.sample import load_model
from unisono_contrib.models.dit import DiTConfig
from unisono_contrib.train.data.flow import conditioned, normals, patched, unpatched

_PIXEL = 8  # of the file, a side of a small picture's pixel
_SMALL = 64  # rows of a picture that is shown larger


def from_run(
    run_dir: Path, checkpoint: Path, count: int, steps: int, guidance: float, seed: int | None
) -> dict[str, Any]:
    """Draw `count` pictures, of each class in turn, into RUN/samples.png; the object of --json. Raises UsageError K01
    for a damaged checkpoint, OSError."""
    recipe, corpus, model = load_model(run_dir, checkpoint)
    config: Any = recipe.model
    classes, shape = config.targets(facts_of(corpus))
    labels = torch.arange(count) % classes
    seed = recipe.seed if seed is None else seed
    pictures = drawn(model, config, shape, labels, classes, steps=steps, guidance=guidance, seed=seed)
    path = run_dir / "samples.png"
    write_whole(path, png(pictures, columns=min(count, classes)))
    return {
        "run_dir": str(run_dir), "checkpoint": str(checkpoint), "picture": str(path), "labels": labels.tolist(),
        "euler_steps": steps, "guidance": guidance,
    }  # fmt: skip


@torch.no_grad()
def drawn(
    model: nn.Module, config: DiTConfig, shape: tuple[int, ...], labels_B: Tensor, classes: int, *,
    steps: int, guidance: float, seed: int,
) -> Tensor:  # fmt: skip
    """Pictures of these classes, float [B, C, Y, X] in 0..1.

    Along v = v(none) + guidance · (v(class) - v(none)) (Ho and Salimans, "Classifier-free diffusion guidance", 2022);
    1: the class's own velocity. Noise is a function of the seed and the picture's place.
    """
    kind = next(model.parameters()).dtype
    start = normals("draw", (len(labels_B), *shape), Noise(seed, torch.arange(len(labels_B))))
    x_BTP = patched(start.to(kind), config.patch)
    for step in range(steps):
        time_B = torch.full((len(labels_B),), step / steps, dtype=kind)
        v_BTP = model(conditioned(x_BTP, time_B, labels_B))
        if guidance != 1.0:
            free_BTP = model(conditioned(x_BTP, time_B, torch.full_like(labels_B, classes)))
            v_BTP = free_BTP + guidance * (v_BTP - free_BTP)
        x_BTP = x_BTP + v_BTP / steps
    return ((unpatched(x_BTP, shape, config.patch) + 1.0) / 2.0).clamp(0.0, 1.0)


def png(pictures_BCYX: Tensor, columns: int) -> bytes:
    """All pictures in one file, row by row, a frame of one pixel around each."""
    B, colours, height, width = pictures_BCYX.shape
    rows = -(-B // columns)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), 64, dtype=np.uint8)
    pixels = (pictures_BCYX * 255).round().byte().expand(-1, max(3, colours), -1, -1)[:, :3]
    for i, picture in enumerate(pixels.permute(0, 2, 3, 1).numpy()):
        y, x = i // columns * (height + 1) + 1, i % columns * (width + 1) + 1
        sheet[y : y + height, x : x + width] = picture
    image, times = Image.fromarray(sheet), _PIXEL if height <= _SMALL else 1
    out = io.BytesIO()
    image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST).save(out, "png")
    return out.getvalue()

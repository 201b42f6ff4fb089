"""What a proof lays out for engines, and what comes back, as plain safetensors. No torch here.

A question is a folder of the one device's steps: `about.json`, `batch-K.safetensors` with `inputs` and `targets`
[N, T] of the whole global batch and the model's constants `cos` and `sin` [T, K/2], and `step-K.safetensors`. Every
answer is a folder of `step-K.safetensors`, torch's too: `loss`, `raw/NAME` and, of torch, `norm`, `lr`, `init/NAME`,
`grad/NAME`, `model/NAME`, `optim/NAME/STATE` after the step.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class EngineQuestion:
    """about: `steps`, `micro_batch`, and of `[model]` and `[train]` what engines need."""

    folder: Path
    about: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "EngineQuestion":
        """What was laid out there."""
        return cls(folder, json.loads((folder / "about.json").read_text()))

    @property
    def steps(self) -> int:
        """Steps to play."""
        return self.about["steps"]

    def batch(self, step: int) -> dict[str, Array]:
        """Inputs, targets and constants."""
        return load_file(self.folder / f"batch-{step}.safetensors")

    def before(self, step: int) -> dict[str, Array]:
        """`model/NAME` and `optim/NAME/STATE` before a step: each begins where the one device began it."""
        if step:
            return {
                k: x
                for k, x in read_step(self.folder, step - 1).items()
                if k.startswith(("model/", "optim/"))
            }
        first = read_step(self.folder, 0)
        return {f"model/{k.removeprefix('init/')}": x for k, x in first.items() if k.startswith("init/")}

    def weights(self, step: int) -> dict[str, Array]:
        """Weights before a step, by name."""
        before = self.before(step).items()
        return {k.removeprefix("model/"): x for k, x in before if k.startswith("model/")}


def read_step(folder: Path, step: int) -> dict[str, Array]:
    """The tensors of one step of an answer; those of several files add up, under equal names."""
    out: dict[str, Array] = {}
    paths = sorted(folder.glob(f"step-{step}.*safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no step {step}")
    for path in paths:
        for key, x in load_file(path).items():
            out[key] = out[key] + x if key in out else x
    return out

"""A question answered in NumPy: every step from the state that it begins with."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from unisono_contrib.verify.engines.answers import EngineQuestion
from unisono_contrib.verify.engines.numpy.net import NumpySizes, loss_and_grads, turns
from unisono_contrib.verify.engines.numpy.update import UpdateLaw


def play(folder: Path, out: Path) -> None:
    """Write loss and gradients of each step into `out`."""
    question = EngineQuestion.read(folder)
    sizes = NumpySizes(**{key: question.about["model"][key] for key in NumpySizes.__dataclass_fields__})
    out.mkdir(parents=True, exist_ok=True)
    for step in range(question.steps):
        batch = question.batch(step)
        pair = batch["cos"], batch["sin"]
        loss, grads = loss_and_grads(sizes, question.weights(step), batch["inputs"], batch["targets"], *pair)
        tensors = {f"raw/{name}": np.ascontiguousarray(grad) for name, grad in grads.items()}
        tensors["cos"], tensors["sin"] = turns(
            len(pair[0]), sizes.each, question.about["model"]["rope_theta"]
        )
        save_file({"loss": np.array([loss]), **tensors}, out / f"step-{step}.safetensors")


def law_of(question: EngineQuestion) -> UpdateLaw:
    """The recipe's update."""
    return UpdateLaw(**{key: question.about["train"][key] for key in UpdateLaw.__dataclass_fields__})

"""One process of JAX: `python -m unisono_contrib.verify.engines.jax.main JOB.json NUMBER`. No torch here."""

import json
import sys
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]


def begin(job: dict[str, Any], number: int) -> None:
    """Devices: some in one process, or one in each of several, which meet over Gloo. Both at once crash XLA
    (openxla/xla#16430)."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    if job["address"]:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(job["address"], job["devices"], number, initialization_timeout=120)
    else:
        jax.config.update("jax_num_cpu_devices", job["devices"])


def main(path: Path, number: int) -> None:
    """Play all steps of a job and write what this process has of them."""
    import numpy as np
    from safetensors.numpy import save_file

    from unisono.programs.schedules import SCHEDULES
    from unisono_contrib.verify.engines.answers import EngineQuestion
    from unisono_contrib.verify.engines.jax.net import JaxSizes
    from unisono_contrib.verify.engines.jax.play import player_of, step_of

    job = json.loads(path.read_text())
    begin(job, number)
    question, shape = EngineQuestion.read(Path(job["question"])), tuple(job["mesh"])
    keys = [key for key in JaxSizes.__dataclass_fields__ if key != "tp"]
    sizes = JaxSizes(**{key: question.about["model"][key] for key in keys}, tp=shape[2])
    schedule = SCHEDULES.read(job["schedule"])
    timetable, micros = schedule.timetable(job["pp"], job["micros"]), job["micros"]
    batch = question.batch(0)
    player = player_of(
        timetable, jax.devices(), shape, job["zero"], sizes, schedule.blocks, question.weights(0),
        (batch["cos"], batch["sin"]), batch["targets"].size, bool(job["address"]),
    )  # fmt: skip
    for step in range(question.steps):
        batch = question.batch(step)
        # Each replica has a stretch of the global batch, and plays its micro-batches in their order.
        cut = [
            batch[key].reshape(shape[0] * shape[1], micros, -1, batch[key].shape[1])
            for key in ("inputs", "targets")
        ]
        inputs, targets = ([x[:, i].reshape(-1, x.shape[-1]) for i in range(micros)] for x in cut)
        leaves = list(zip(inputs, targets, strict=True))
        tensors = step_of(player, question.weights(step), leaves)
        if writes(player.rows, number):
            whole = {key: np.ascontiguousarray(x) for key, x in tensors.items()}
            save_file(whole, path.parent / f"step-{step}.{number}.safetensors")


def writes(rows: Any, number: int) -> bool:
    """Whether this process is the first of its row."""
    return any(row.devices.flat[0].process_index == number for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

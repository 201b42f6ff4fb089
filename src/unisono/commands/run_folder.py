"""The folder of a run: runs/NAME/ID, and what is written there before the first step."""

import os
import secrets
from datetime import datetime
from pathlib import Path

from unisono.config import Recipe
from unisono.observe import environment
from unisono.observe.files import write_whole
from unisono.spec.errors import UsageError


def make_run_dir(recipe: Recipe, config_text: str) -> Path:
    """Make the folder of a new run, with `config.resolved.toml` and `env.json`. Raises UsageError O01 if it cannot."""
    parent = Path(recipe.out.dir) / recipe.name
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        (parent / name).mkdir(parents=True)
        write_whole(parent / name / "config.resolved.toml", config_text)
        environment.write(parent / name / "env.json", os.environ)
        write_whole(parent / "latest", name + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write the run folder {parent / name}: {error.strerror or error}",
            where=f"out.dir = {recipe.out.dir!r}",
            likely="the folder is read-only, or the disk is full",
            fix="--out.dir FOLDER that can be written",
            code="O01",
        ) from error
    return parent / name

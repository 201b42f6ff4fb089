"""Recipes with jobs, and schedulers' commands that write down what they were called with."""

from collections.abc import Sequence
from pathlib import Path

from unisono.config import load
from unisono_contrib.submit.job import JobRequest, job_of

RECIPE = """\
name = "small"
plan = "{plan}"
[model]
n_layer = 2
n_head = 2
d_model = 32
context = 16
[data]
source = "stdlib"
[train]
steps = 8
global_batch = 8
micro_batch = 1
{more}
"""


def job(
    folder: Path,
    plan: str = "dp=2 tp=2",
    more: str = "",
    flags: Sequence[tuple[str, str]] = (),
    name: str = "small",
) -> JobRequest:
    """The job of a small recipe. more: sections behind [train]."""
    file = folder / "small.toml"
    file.write_text(RECIPE.format(plan=plan, more=more))
    return job_of([load(file, flags)], name)


def commands(folder: Path, **bodies: str) -> Path:
    """A folder of commands, each a shell script that first writes its words to `calls`."""
    place = folder / "bin"
    place.mkdir()
    for name, body in bodies.items():
        (place / name).write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder}/calls"\n{body}\n')
        (place / name).chmod(0o755)
    return place

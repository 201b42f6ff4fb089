"""The software that `--stack` names: a built-in stack, or a user's own, scaled to a run that was measured."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono import config
from unisono.planner.from_recipe import request_of
from unisono.planner.simulate import simulate
from unisono.planner.stack import Stack, read_stack, scaled, stack
from unisono.planner.toml_tables import Table, is_file
from unisono.verbs._sizes import model_of

_RUN = ("recipe", "cluster", "plan", "micro_batch", "step_s")
_CLOSE, _LEAST, _TRIES = 1e-9, 1e-3, 100


def stack_of(text: str, where: str, environ: Mapping[str, str]) -> Stack:
    """The stack of a name or a file, for prices on a cluster. Raises UsageError."""
    if not is_file(text):
        return stack(text)
    read, run = read_stack(Path(text))
    return read if run is None else scaled(read, _factor(read, run, Path(text).parent, environ))


def _factor(software: Stack, run: Table, folder: Path, environ: Mapping[str, str]) -> float:
    """How many times as long as its price a measured run took: that of which the price is the measurement."""
    run.known(_RUN)
    flags = [("plan", run.text("plan"))]
    if "micro_batch" in run.values:
        flags.append(("train.micro_batch", str(run.count("micro_batch", 1))))
    got = config.load(str(folder / run.text("recipe")), flags)
    ask = request_of(got, model_of(got, environ), run.text("cluster"), software)
    took, factor, tries = run.number("step_s")[0], 1.0, 0
    while factor > _LEAST and tries < _TRIES:
        tries += 1
        off = took / simulate(replace(ask, stack=scaled(software, factor))).price.step
        if abs(off - 1.0) < _CLOSE:
            return factor
        factor *= off
    raise run.wrong(
        "no such run takes so few seconds: what its messages wait is more", "step_s", "seconds of one step"
    )

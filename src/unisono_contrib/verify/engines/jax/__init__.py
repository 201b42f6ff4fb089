"""JAX as a second engine: one device, and plans over dp, shard, tp and pp, in processes of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from unisono.config import Resolved
from unisono.plan.fields import USUAL
from unisono.plan.grammar import member
from unisono_contrib.verify.engines import StepEngine, beyond_engines

_PLAYED = ("dp", "shard", "zero", "pp", "schedule", "micros", "tp", "sync", "precision")
_NO_MATTER = ("collective", "cp_kind")


class JaxEngine(StepEngine):
    """Meshes of devices in one process, or a process for each device."""

    name: ClassVar[str] = "jax"
    spreads: ClassVar[bool] = True
    library: ClassVar[str] = "jax"
    entry: ClassVar[str] = "unisono_contrib.verify.engines.jax.main"

    processes: bool = Field(default=False, description="a process for each device, over Gloo")

    def problem(self, resolved: Resolved) -> str:
        return beyond_engines(resolved) or next(_unplayed(resolved), "")

    def play(self, question: Path, resolved: Resolved, out: Path) -> None:
        from unisono_contrib.verify.engines.jax.start import start

        start(self.entry, question, resolved, out, self.processes)


def _unplayed(resolved: Resolved) -> Iterator[str]:
    """What of a plan it does not play."""
    plan, model = resolved.plan, resolved.recipe.model
    for key in USUAL.__dataclass_fields__:
        if key in ("options", "said", *_PLAYED, *_NO_MATTER):
            continue
        if getattr(plan, key) != getattr(USUAL, key):
            yield f"{key}={plan.text(key)}, which it does not play"
    for key in ("zero", "tp"):
        if type(plan.text(key)) is not int:  # a grid of ranks is a number too
            yield f"{key}={plan.text(key)}: it plays plain numbers alone"
    schedule = member("schedule", plan.schedule)
    if schedule is None or not schedule.flushed:
        yield f"schedule={plan.schedule}, whose updates stand inside a timetable"
    sizes = {"key/value heads": model.kv_heads, "hidden width": model.ff_width, "context": model.context}  # type: ignore[attr-defined]
    for noun, size in sizes.items():
        if size % plan.tp:
            yield f"tp={plan.tp}, which does not divide {noun} {size}"

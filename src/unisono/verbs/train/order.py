"""What every rank of a training run is told. No torch: it crosses to the ranks as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unisono.config import Recipe
from unisono.plan import Plan


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """A resolved recipe and plan, the recipe as TOML with its origins, the run folder (None while there is none), and
    whether to go on from a checkpoint in it. checkpoint: which one, "step-000200"; the newest whole one if "". chaos: a
    script of faults as text, "" for none. launches: supervisors of this command that were killed before this one.
    speeds: of the replicas, where leaves are not dealt to them alike."""

    recipe: Recipe
    plan: Plan
    config_text: str
    run_dir: Path | None = None
    resume: bool = False
    checkpoint: str = ""
    auto: bool = False
    chaos: str = ""
    launches: int = 0
    speeds: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As ranks get it."""
        return {
            "recipe": self.recipe.model_dump_json(exclude_unset=True),
            "plan": str(self.plan),
            "config_text": self.config_text,
            "run_dir": str(self.run_dir) if self.run_dir is not None else None,
            "resume": self.resume,
            "checkpoint": self.checkpoint,
            "auto": self.auto,
            "chaos": self.chaos,
            "speeds": list(self.speeds),
            "launches": self.launches,
        }

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """What `as_json` made, in a rank."""
        run_dir = Path(told["run_dir"]) if told["run_dir"] else None
        recipe = Recipe.model_validate_json(told["recipe"])
        return cls(
            recipe,
            Plan.parse(told["plan"]),
            told["config_text"],
            run_dir,
            told["resume"],
            told["checkpoint"],
            told["auto"],
            told["chaos"],
            told["launches"],
            tuple(told["speeds"]),
        )

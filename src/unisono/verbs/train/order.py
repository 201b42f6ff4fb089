"""What every rank of a training run is asked to do. No torch: it crosses to the ranks as JSON."""

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
    speeds: of the replicas, where leaves are not dealt to them alike. until: the step after which this start ends; 0:
    the recipe's last."""

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
    until: int = 0

    def as_json(self) -> dict[str, Any]:
        """The JSON object that ranks get."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "recipe": self.recipe.model_dump_json(exclude_unset=True),
            "plan": str(self.plan),
            "run_dir": str(self.run_dir) if self.run_dir is not None else None,
            "speeds": list(self.speeds),
        }

    @classmethod
    def read(cls, order: Mapping[str, Any]) -> Self:
        """What `as_json` made, in a rank."""
        values = {name: order[name] for name in cls.__slots__}
        values["recipe"] = Recipe.model_validate_json(order["recipe"])
        values["plan"] = Plan.parse(order["plan"])
        values["run_dir"] = Path(order["run_dir"]) if order["run_dir"] else None
        return cls(**{**values, "speeds": tuple(order["speeds"])})

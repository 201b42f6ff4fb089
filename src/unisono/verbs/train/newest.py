"""`--resume auto`: which run of a name one command goes on with, however often it is started. No torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.config import Recipe
from unisono.spec.runs import CHECKPOINTS, CONFIG
from unisono.verbs.train.folder import finished


@dataclass(frozen=True, slots=True)
class Newest:
    """run_dir: the run to go on with, None for a new one. done: the summary of one that has made all its steps.
    resumes: whether it goes on from a checkpoint."""

    run_dir: Path | None = None
    done: dict[str, Any] | None = None
    resumes: bool = False

    def as_json(self) -> dict[str, Any]:
        """As rank 0 tells it."""
        return asdict(self) | {"run_dir": str(self.run_dir) if self.run_dir is not None else None}

    @classmethod
    def of(cls, told: dict[str, Any]) -> "Newest":
        """What `as_json` made."""
        return cls(Path(told["run_dir"]) if told["run_dir"] else None, told["done"], told["resumes"])


def newest(recipe: Recipe) -> Newest:
    """The newest run of the recipe's name, if it is not finished; one behind it where that alone has a checkpoint. What
    lies behind a finished run is left alone: its command was another."""
    open_: list[Path] = []
    for run in _by_age(Path(recipe.out.dir) / recipe.name):
        if (done := finished(run, recipe.train.steps)) is not None:
            if not open_:
                return Newest(run, done)
            break
        open_.append(run)
    return Newest(next((run for run in open_ if has_checkpoint(run)), open_[0] if open_ else None))


def has_checkpoint(run_dir: Path) -> bool:
    """Whether it has one to go on from, whole or not."""
    return any((run_dir / CHECKPOINTS).glob("step-*/manifest.json"))


def _by_age(parent: Path) -> list[Path]:
    """Run folders, the newest first: by the time in their names, then by when they were made."""
    runs = [path for path in parent.glob("*") if (path / CONFIG).is_file()]
    return sorted(runs, key=lambda run: (run.name[:15], _made(run)), reverse=True)


def _made(run: Path) -> float:
    try:
        return (run / "env.json").stat().st_mtime  # which nobody writes again
    except OSError:
        return 0.0

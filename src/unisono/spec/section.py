"""Sections of a recipe that a capability brings along, a file each in the sister package: `[federated]`. No torch."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from unisono.spec.errors import Problem
from unisono.spec.finder import Finder


class Section(BaseModel):
    """The keys of one such section, each with its default and a line of help. A recipe without it has None there.

    pins: keys that must be as they were when a run goes on. What changes a run, changes it through the functions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]

    @property
    def pins(self) -> tuple[str, ...]:
        return ()

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        """What of a recipe and a plan cannot be played with it."""
        yield from ()

    def batches(self, recipe: Any, dataset: Any, device: Any, dtype: Any) -> Any:
        """The `train.data.feed.Feed` of training, of a resolved recipe; None: the usual one."""
        return None

    def around(self, recipe: Any, samples: int) -> Callable[[Any], Any] | None:
        """What is done with each live run (`train.step.run.Run`) when its ranks have met, before its first step; it
        returns the run. samples: of the training data. None: nothing. Every rank calls it."""
        return None


RECIPE_SECTIONS: Finder[Section] = Finder("section", "unisono.config.sections", Section, "recipe")


def sections_of(recipe: Any) -> list[Section]:
    """Those that a recipe has."""
    sections = (getattr(recipe, name) for name in RECIPE_SECTIONS.names())
    return [section for section in sections if section is not None]

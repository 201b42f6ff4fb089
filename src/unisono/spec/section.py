"""Sections of a recipe that a capability brings along, a file each in the sister package: `[federated]`. No torch."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from unisono.spec.finder import Finder


class Section(BaseModel):
    """The keys of one such section, each with its default and a line of help. A recipe without it has None there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]


RECIPE_SECTIONS: Finder[Section] = Finder("section", "unisono.config.sections", Section, "recipe")

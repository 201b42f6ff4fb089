"""Sections of a recipe that a capability brings along, a file each in the sister package: `[federated]`. No torch."""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.finder import Finder


class Section(BaseModel):
    """The keys of one such section, each with its default and a line of help. A recipe without it has None there.

    verb: the command that plays a recipe with it, where `train` does not. by_sample: a step computes gradients of
    single samples, and holds those of a micro-batch at a time. one_run: it acts on
    steps, validations or weights of one run, which clients of a federated one do not have.

    A section that changes how a run trains has its live part in the sister package, as `train/build/NAME.py`, with
    one or more of these functions: `batches(section, recipe, plan, dataset, device, kept)`, the feed of training, or
    None for the usual one, where `kept` is the run's `Update.keeps`; `around(section, recipe, corpus)`, a function of
    each live run when its ranks have met, which returns the run; `judge(section, run, values)`, a `ValidationVerdict`
    of the numbers of each validation, and with it `judged(section, run)`, that of a run that is resumed;
    `observer(section, run)`, an `Observer` on rank 0, where `run` is the `RunFacts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    verb: ClassVar[str] = ""
    by_sample: ClassVar[bool] = False
    one_run: ClassVar[bool] = False

    @classmethod
    def of(cls, recipe: Any) -> Self:
        """The recipe's own, with its type. Raises LookupError where it has none."""
        section = getattr(recipe, cls.name)
        if not isinstance(section, cls):
            raise LookupError(f"the recipe has no [{cls.name}]")
        return section

    @property
    def kept(self) -> int:
        """Numbers in fp32 that it keeps of each weight that learns, sharded as it is."""
        return 0

    def fidelity(self, plan: Any) -> Fidelity:
        """How close to one device a plan can come at most with it: ROUNDING where it adds up in another order."""
        return Fidelity.EXACT

    def average_step(self, update: int) -> float:
        """Share of the way to the weights that its averages of them go in an update, of which 1 is the first; 0.0 where
        it keeps none."""
        return 0.0

    @property
    def pins(self) -> tuple[str, ...]:
        """Keys of the recipe that must be as they were when a run goes on."""
        return ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The roles of the processes that it wants beside the ranks, as `launch.run.membership.Role` names them."""
        return ()

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        """What of a recipe and a plan cannot be played with it."""
        yield from ()


RECIPE_SECTIONS: Finder[Section] = Finder("section", "unisono.config.sections", Section, "recipe")

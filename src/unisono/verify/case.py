"""A step of a proof that went wrong: all that the search for a cause looks at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from unisono.plan import Plan
from unisono.verify.compare import Divergence
from unisono.verify.record import Record
from unisono.verify.room import CompareTerms


@dataclass(frozen=True, slots=True)
class Case:
    """A step that went wrong, and what was found out about it afterwards.

    leaves: tensor → [leaves, ...], the reference's gradient of each leaf. old_losses: the step's losses under the
    parameters of the step before, if there is one. calm: whether the plan passes without dropout; None: not tried.
    crossed: [inputs of leaf, targets of leaf], what the losses would be. tokens: of each leaf, in its inputs and in its
    targets. foreign: names of modules that draw their own dropout.
    """

    plan: Plan
    terms: CompareTerms
    step: int
    divergences: Sequence[Divergence]
    ref: Record
    before: Record | None
    seen: Record
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    old_losses: Sequence[float] | None = None
    calm: bool | None = None
    crossed: Tensor | None = None
    tokens: Sequence[tuple[frozenset[int], frozenset[int]]] = ()
    foreign: Sequence[str] = ()

    @property
    def owners(self) -> Mapping[str, str]:
        """Return alias → owner of tied weights."""
        return self.terms.owners

    @property
    def unit(self) -> float:
        """Return the roundoff of the run."""
        return self.terms.bounds.unit

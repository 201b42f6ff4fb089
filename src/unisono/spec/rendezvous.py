"""The ranks of a run meet anew after one of them was lost: what each is told. No torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks of a run meet anew.

    epoch: how often they have met before. store: a torch Store of this epoch alone, so that no word of an earlier one
    is read.
    """

    epoch: int
    store: Any

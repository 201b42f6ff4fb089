"""How a rank reaches the processes that stand beside the ranks, such as samplers. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BesideRanks:
    """store: a torch Store whose keys stay when ranks meet anew. token: shared by all processes of the run, and nobody
    else. note(text): shows a line to the user."""

    store: Any = field(repr=False)
    token: str = field(repr=False)
    note: Callable[[str], None] = lambda text: None

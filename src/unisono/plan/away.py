"""What `recompute` and `offload` of a plan come to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.plan.grammar import choice

if TYPE_CHECKING:
    from unisono.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Again:
    """Blocks of each stage that are computed again in backward: so many of its first ones wholly, so many after them in
    what the model's anatomy names."""

    full: int = 0
    selective: int = 0


@dataclass(frozen=True, slots=True)
class Away:
    """What lies elsewhere while nobody computes with it. on_disk: in a file, rather than in the host's memory."""

    optimizer: bool = False
    params: bool = False
    activations: bool = False
    on_disk: bool = False

    def __bool__(self) -> bool:
        return self.optimizer or self.params or self.activations


def again_of(plan: "Plan", blocks: int) -> Again:
    """Of a stage with so many blocks. `auto` that nobody has chosen for is none."""
    got = choice(plan.recompute)
    full = blocks if got.name == "full" else min(blocks, int(got.options.get("full", 0)))
    selective = blocks if got.name == "selective" else int(got.options.get("selective", 0))
    return Again(full, min(selective, blocks - full))


def away_of(plan: "Plan") -> Away:
    """Of stem and head, and of blocks of which no range says another."""
    return away_in(plan.offload)


def away_in(text: str) -> Away:
    """Of a value of `offload`. `params` takes the optimiser with it: its numbers are read where the weights are, and
    are twice as many."""
    got = choice(text)
    words = {got.name, *got.marks}
    return Away(
        bool(words & {"optimizer", "params"}), "params" in words, "activations" in words,
        got.options.get("to") == "disk",
    )  # fmt: skip


def text_of(away: Away) -> str:
    """The value of `offload` that says it."""
    if not away:
        return "none"
    first = "params" if away.params else "optimizer" if away.optimizer else "activations"
    more = "+activations" if away.activations and first != "activations" else ""
    return f"{first}{':to=disk' if away.on_disk else ''}{more}"

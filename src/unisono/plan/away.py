"""What `recompute` and `offload` of a plan come to."""

from dataclasses import dataclass

from unisono.plan.grammar import choice
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


def again_of(plan: Plan, blocks: int) -> Again:
    """Of a stage with so many blocks. `auto` that nobody has chosen for is none."""
    got = choice(plan.recompute)
    full = blocks if got.name == "full" else min(blocks, int(got.options.get("full", 0)))
    selective = blocks if got.name == "selective" else int(got.options.get("selective", 0))
    return Again(full, min(selective, blocks - full))


def away_of(plan: Plan) -> Away:
    """`params` takes the optimiser with it: its numbers are read where the weights are, and are twice as many."""
    got = choice(plan.offload)
    words = {got.name, *got.marks}
    return Away(
        bool(words & {"optimizer", "params"}), "params" in words, "activations" in words,
        got.options.get("to") == "disk",
    )  # fmt: skip

"""What `recompute` and `offload` of a plan come to."""

from dataclasses import dataclass

from unisono.plan.grammar import choice
from unisono.plan.keys import PlanKeys


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


def again_of(plan: PlanKeys, blocks: int, stage: int = 0) -> Again:
    """Of a stage with so many blocks. `auto` that nobody has chosen for is none."""
    got = choice(plan.recompute)

    def said(mode: str) -> int:
        counts = str(got.options.get(mode, 0)).split("/")
        return int(counts[stage] if len(counts) > 1 else counts[0])

    full = blocks if got.name == "full" else min(blocks, said("full"))
    selective = blocks if got.name == "selective" else said("selective")
    return Again(full, min(selective, blocks - full))


def stages_said(plan: PlanKeys) -> frozenset[int]:
    """For how many stages `recompute` says a number each; none where one number is of all stages."""
    counts = (str(value).count("/") + 1 for value in choice(plan.recompute).options.values())
    return frozenset(count for count in counts if count > 1)


def away_of(plan: PlanKeys) -> Away:
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

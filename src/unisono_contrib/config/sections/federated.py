"""`[federated]`: who trains in a round, on which samples, and what becomes of it."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.family import one_of
from unisono.spec.finder import family_in
from unisono.spec.section import Section
from unisono.spec.training import Count, Natural, Positive, Share
from unisono_contrib.spec.federated import AGGREGATES, SPLITS, STRATEGIES


class FederatedConfig(Section):
    """Clients that keep their data and meet in rounds. `[train]` says what a client does: global_batch samples a local
    step, its optimiser, lr; lr_schedule, eval_every and save_every count in rounds."""

    name: ClassVar[str] = "federated"

    clients: Count = Field(default=10, description="how many there are")
    rounds: Count = Field(default=10, description="server steps of the whole run")
    participation: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="share of the clients that are asked in a round, one at least",
    )
    dropout: Share = Field(
        default=0.0, description="probability that a client that was asked does not answer"
    )
    stragglers: Share = Field(
        default=0.0, description="probability that a client has done only a part of its local steps in time"
    )
    late: Literal["drop", "partial"] = Field(
        default="drop", description="a straggler: drop it, or take what it has done"
    )
    local_epochs: Count = Field(default=1, description="passes of a client over its samples in a round")
    local_steps: Natural = Field(default=0, description="local steps in a round, instead of local_epochs")
    split: Annotated[str, one_of(SPLITS)] = Field(default="iid", description=SPLITS.listed())
    strategy: Annotated[str, one_of(STRATEGIES)] = Field(default="fedavg", description=STRATEGIES.listed())
    aggregate: Annotated[str, one_of(AGGREGATES)] = Field(default="mean", description=AGGREGATES.listed())
    weights: Literal["samples", "equal"] = Field(
        default="samples", description="what a client counts for: its samples, or as much as any other"
    )
    codec: Annotated[str, one_of(family_in("unisono.codecs"))] = Field(
        default="plain", description="compression of what clients send: a codec as in the plan, +ef too"
    )
    patience: Positive = Field(
        default=60.0,
        description="real clients: seconds of a round after which who has not answered drops out",
    )


def problems_of(recipe: Any, plan: Any) -> Iterator[Problem]:
    """What keeps a recipe from being played by clients."""
    if recipe.federated is None:
        what = "the recipe has no [federated] section, which says who the clients are"
        yield Problem("C06", what, "federated", "[federated] with clients = 10")
    else:
        yield from STRATEGIES.read(recipe.federated.strategy).problems(recipe.train)
    if plan.world != 1:
        what = f"each client trains on one device, and plan {plan} takes {plan.world}"
        yield Problem("C06", what, "plan", 'plan = "dp=1"; precision= and recompute= are free')

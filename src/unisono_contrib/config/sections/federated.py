"""`[federated]`: who trains in a round, on which samples, and what becomes of it."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.family import one_of
from unisono.spec.fidelity import Fidelity
from unisono.spec.finder import family_in
from unisono.spec.section import Section
from unisono.spec.training import Count, Natural, Positive, Share
from unisono_contrib.spec.federated import AGGREGATES, SPLITS, STRATEGIES


class FederatedConfig(Section):
    """Clients that keep their data and meet in rounds. `[train]` says what a client does: global_batch samples a local
    step, its optimiser, lr; lr_schedule, eval_every and save_every count in rounds."""

    name: ClassVar[str] = "federated"
    verb: ClassVar[str] = "federate"

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
    secure: bool = Field(
        default=False, description="secure aggregation: the server learns the sum of a round's deltas alone"
    )
    secure_limit: Positive = Field(
        default=8.0, description="secure: greatest number of a weighted delta; beyond it the round is refused"
    )
    secure_bits: int = Field(default=32, ge=1, le=60, description="secure: bits of a number's fraction")
    secure_threshold: float = Field(
        default=0.67, gt=0.5, le=1.0, description="secure: share of a round's clients that must not drop out"
    )
    patience: Positive = Field(
        default=60.0,
        description="real clients: seconds of a round after which who has not answered drops out",
    )

    @property
    def pins(self) -> tuple[str, ...]:
        return tuple(f"federated.{key}" for key in ("clients", "split", "strategy", "codec"))

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        yield from STRATEGIES.read(self.strategy).problems(recipe.train)
        yield from _hidden(self, recipe.privacy)
        for section in (section for section in recipe.sections() if section.one_run):
            what = f"[{section.name}] follows the steps of one run, and rounds of clients have none"
            yield Problem("C06", what, f"{section.name}, federated", f"without [{section.name}]")
        if plan.world != 1:
            what = f"each client trains on one device, and plan {plan} takes {plan.world}"
            yield Problem("C06", what, "plan", 'plan = "dp=1"; precision= and recompute= are free')


def _hidden(federated: FederatedConfig, privacy: Any) -> Iterator[Problem]:
    """What would show more of a client than [privacy] or secure sums promise."""
    aggregate, strategy = AGGREGATES.read(federated.aggregate), STRATEGIES.read(federated.strategy)
    codec = family_in("unisono.codecs").read(federated.codec)
    for on, key in ((federated.secure, "federated.secure"), (privacy is not None, "privacy")):
        if on and not aggregate.linear:
            what = f"aggregate={aggregate.name} compares the deltas of clients, of which {key} shows none but a mean"
            yield Problem("P42", what, f"federated.aggregate, {key}", "aggregate = mean, or without it")
        if on and strategy.client_keeps:
            what = f"strategy={strategy.name} sends {', '.join(strategy.client_keeps)} of each client as they are"
            yield Problem("P42", what, f"federated.strategy, {key}", "another strategy, such as fedavg")
        if on and strategy.asynchronous:
            what = f"strategy={strategy.name} has no rounds of clients, over which {key} could sum"
            yield Problem("P42", what, f"federated.strategy, {key}", "another strategy, such as fedavg")
        if on and codec.fidelity is not Fidelity.EXACT:
            what = f"codec={federated.codec} changes a delta after it was bounded, on its way to {key}"
            yield Problem("P42", what, f"federated.codec, {key}", "codec = plain")

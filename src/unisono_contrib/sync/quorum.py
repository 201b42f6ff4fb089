"""A quorum with backup replicas: an update takes the first k gradients of its step.

Chen et al. 2016, "Revisiting distributed synchronous SGD" (arXiv 1604.00981).

A replica that comes too late goes on with the newest step. Its gradient is dropped, or kept and added to its next one
(error feedback). One that was late `patience` times in a row is waited for, so that its data counts.

Fidelity: LOSSY. Identity: k = dp is `every_step`, with any optimiser.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.sync import Identity
from unisono_contrib.sync._served import ServedPolicy
from unisono_contrib.sync._servers.rules import Quorum, Rule


class QuorumPolicy(ServedPolicy):
    """The first k replicas' gradients make an update; the others are backup."""

    name: ClassVar[str] = "quorum"
    main: ClassVar[str] = "k"
    identities = (Identity("quorum:k=2", "every_step"),)

    k: int = Field(ge=1, description="gradients that make an update")
    late: Literal["drop", "keep"] = Field(
        default="drop",
        description="what becomes of a late gradient; keep: it is added to the replica's next one",
    )
    patience: int = Field(
        default=3, ge=0, description="late steps in a row after which a replica is waited for; 0: never"
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from super().problems(plan, batch)
        if plan.dp != -1 and self.k > plan.dp:
            what = f"sync={plan.sync}: {self.k} gradients never come from dp={plan.dp} replicas"
            yield Problem("P16", what, "plan.sync, plan.dp", f"k={plan.dp}, or less")

    def rule(self, replicas: int) -> Rule:
        return Quorum(self.k, self.patience)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._servers.worker import Offer, ServerSync

        late = self.late == "keep"
        return ServerSync(site, Offer(self.rule(site.dp.size), keeps_late=late, copies=self.copies))

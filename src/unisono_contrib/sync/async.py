"""Asynchronous training: each gradient is an update as soon as it arrives (Dean et al. 2012).

rate=aware: learning rates are divided by the staleness (Zhang et al. 2016, arXiv 1511.05950). dc: the gradient is
corrected for how the weights have moved since they were read, g + dc·g⊙g⊙(w - w_read) (DC-ASGD, Zheng et al. 2017,
arXiv 1609.08326).

Fidelity: LOSSY. Identities: with one replica it is sequential training; dc=0 and rate=aware with a staleness of at most
1 change nothing.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.sync import Identity
from unisono_contrib.sync._served import ServedPolicy
from unisono_contrib.sync._servers.rules import Rule, Unbounded


class Async(ServedPolicy):
    """Replicas push gradients to servers, each of which is an update, and wait for nobody."""

    name: ClassVar[str] = "async"
    identities = (
        Identity("async", "every_step", replicas=1),
        Identity("async:rate=aware", "every_step", replicas=1),
    )

    rate: Literal["plain", "aware"] = Field(
        default="plain", description="aware: learning rates are divided by the staleness"
    )
    dc: float = Field(default=0.0, ge=0.0, description="delay compensation, the factor of DC-ASGD; 0: none")

    def rule(self, replicas: int) -> Rule:
        return Unbounded(replicas, self.rate == "aware")

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._servers.worker import Offer, ServerSync

        return ServerSync(site, Offer(self.rule(site.dp.size), self.dc, copies=self.copies))

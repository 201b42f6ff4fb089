"""Stale synchronous parallel: replicas are at most s steps apart (Ho et al. 2013).

The weights and their optimiser lie with servers. Update c is the mean gradient of step c of all replicas; a replica
that is up to s steps ahead computes with older weights in the meantime.

Fidelity: LOSSY. Identity: s=0 is `every_step`, with any optimiser.
"""

from typing import Any, ClassVar

from pydantic import Field

from unisono.sync import Identity
from unisono_contrib.sync._served import ServedPolicy
from unisono_contrib.sync._servers.rules import Bounded, Rule


class Ssp(ServedPolicy):
    """Replicas push gradients to servers, and are at most s steps apart."""

    name = "ssp"
    main: ClassVar[str] = "s"
    identities = (Identity("ssp:s=0", "every_step"),)

    s: int = Field(default=4, ge=0, description="steps that a replica may be ahead of the slowest")

    def rule(self, replicas: int) -> Rule:
        return Bounded(self.s)

    def bind_outer(self, site: Any) -> Any:
        from unisono_contrib.sync._servers.worker import Offer, ServerSync

        return ServerSync(site, Offer(self.rule(site.dp.size), copies=self.copies))

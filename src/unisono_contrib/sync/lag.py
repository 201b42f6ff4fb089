"""Lazily aggregated gradients: a replica uploads its gradient if it has changed (LAG-WK, Chen et al. 2018, arXiv
1805.09965).

The update takes, of each replica, the gradient that it uploaded last. A replica uploads where

    |new - uploaded|^2  >  xi / n^2 * (|u_1|^2 + ... + |u_window|^2),

with n replicas and u_i the gradient that the i-th last update took. For gradient descent at a constant rate r these are
the paper's moves of the weights, |w_k - w_(k-1)|^2 / r^2; here they serve for any optimiser. It is meant for large
batches: the noise of small ones alone changes every gradient more than that. With tied embeddings on two stages of a
pipeline, the parts of a gradient that the two have are measured each by itself.

Fidelity: LOSSY. Identities: xi=0 is `every_step`, with any optimiser.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Identity, Policy, Sync
from unisono_contrib.sync._local import plain_problems

if TYPE_CHECKING:
    from unisono.comm.group import Group


class Lag(Policy):
    """Every step, the sum of the gradients that replicas uploaded last; those upload whose gradient has changed."""

    name = "lag"
    main: ClassVar[str] = "xi"
    fidelity = Fidelity.LOSSY
    lazy = True
    identities = (Identity("lag:xi=0", "every_step"), Identity("lag:xi=0", "every_step", replicas=4))

    xi: float = Field(
        default=0.1, ge=0.0, description="how much a gradient may change and not be uploaded; 0: not at all"
    )
    window: int = Field(default=10, ge=1, description="updates by whose gradients a change is measured")

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from plain_problems(plan, "what replicas have uploaded adds up over steps")
        if plan.precision == "fp16":
            what = (
                f"sync={plan.sync}: gradients of other steps are kept, and precision=fp16 changes their scale"
            )
            yield Problem("P16", what, "plan.sync, plan.precision", "precision=bf16")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        """At most: where all upload in every step."""
        nbytes = 2 * gradient_bytes * (dp - 1) // dp
        return Work((Call("dp", "all_reduce", nbytes),), 2 * gradient_bytes + 8 * self.window)

    def bind(self, slots: Sequence[Any], group: "Group", codec: Any) -> Sync:
        from unisono_contrib.sync._lag import LagSync

        return LagSync(slots, group, codec, self.xi, self.window)

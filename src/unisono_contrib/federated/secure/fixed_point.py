"""Numbers as integers modulo 2^64, whose sum is exact in any order: what masks need.

A value beyond the limit is refused, never clipped: a clipped sum looks like a right one. That the sum of a round cannot
wrap is checked before the round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.spec.errors import UsageError

MODULUS_BITS = 64
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Values from -limit to limit in steps of 2^-fraction_bits, each times a whole weight from 1 to max_weight.

    `FixedPoint(limit=8.0, fraction_bits=32, max_weight=1000).require_room(100)` has 11 bits to spare."""

    limit: float = 8.0
    fraction_bits: int = 32
    max_weight: int = 1

    def room(self, clients: int) -> float:
        """Bits to spare in the sum of a round: 63 - fraction_bits - log2(limit) - log2(clients · max_weight). Below 0
        it may wrap."""
        return (
            MODULUS_BITS
            - 1
            - self.fraction_bits
            - math.log2(self.limit)
            - math.log2(clients * self.max_weight)
        )

    def require_room(self, clients: int) -> None:
        """Before a round. Raises UsageError A02 where its sum may wrap."""
        largest = clients * self.max_weight * math.ceil(math.ldexp(self.limit, self.fraction_bits))
        if largest < 2 ** (MODULUS_BITS - 1):
            return
        bits = math.ceil(self.fraction_bits + self.room(clients)) - 1
        raise UsageError(
            f"the sum of {clients} clients with weights up to {self.max_weight} may wrap around {MODULUS_BITS} bits:"
            f" it needs log2({clients} · {self.max_weight}) = {math.log2(clients * self.max_weight):.1f} bits beside"
            f" {self.fraction_bits} of fractions",
            where="federated.secure",
            fix=f"fraction_bits={bits} or less" if bits > 0 else "smaller weights, or a lower limit",
            code="A02",
        )

    def encode(self, values: Mapping[str, NDArray[np.float64]], client: object, weight: int = 1) -> Words:
        """weight · values, one after the other, uint64 [d]. values: by parameter, any shapes. Raises UsageError A01,
        with client and parameter, where one is beyond the limit or no number, or the weight is out of range."""
        if not 1 <= weight <= self.max_weight:
            what = f"client {client} has weight {weight}, and secure aggregation takes 1 to {self.max_weight}"
            raise UsageError(what, where="federated.secure", fix="a larger max_weight", code="A01")
        words = [
            self._whole(name, np.asarray(x, dtype=np.float64).reshape(-1), client)
            for name, x in values.items()
        ]
        whole = np.concatenate(words) if words else np.zeros(0, dtype=np.int64)
        return (whole * np.int64(weight)).view(np.uint64)

    def _whole(self, name: str, x: NDArray[np.float64], client: object) -> NDArray[np.int64]:
        within = np.abs(x) <= self.limit  # False for what is no number
        if not within.all():
            worst = float(x[int(np.argmin(within))])
            raise UsageError(
                f"client {client}: {name} is beyond the limit {self.limit:g} of secure aggregation",
                where="federated.secure",  # the number stays in `likely`, which no client sends to its server
                likely=f"it has {worst:g}: a client that diverged, or a limit for smaller updates",
                fix="a larger limit, or bound deltas by [privacy] clip",
                code="A01",
            )
        return np.rint(np.ldexp(x, self.fraction_bits)).astype(np.int64)

    def decode(self, total: Words, weight: int = 1) -> NDArray[np.float64]:
        """The sum of encoded vectors as numbers, over `weight`, float64 [d]. weight: the sum of all that were in it;
        1 for the plain sum."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.fraction_bits) / weight

"""What the server and the clients of secure rounds must have alike: numbers, threshold, the name of a round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.secure.client import require_majority
from unisono_contrib.federated.secure.fixed_point import FixedPoint, Words
from unisono_contrib.federated.secure.masks import require_library


@dataclass(frozen=True, slots=True)
class SecureTerms:
    """Of one run. sizes: numbers of each parameter of a delta, in its order. share: of a round's clients that must
    reveal, more than half. seed: of the run."""

    point: FixedPoint
    sizes: Mapping[str, int]
    share: float
    seed: int

    @classmethod
    def of(cls, config: FederatedConfig, sizes: Mapping[str, int], seed: int) -> "SecureTerms | None":
        """Of a `[federated]` section; None where it is not secure. Raises UsageError E01 without `cryptography`."""
        if not config.secure:
            return None
        require_library()
        return cls(FixedPoint(config.secure_limit, config.secure_bits), sizes, config.secure_threshold, seed)

    @property
    def numel(self) -> int:
        """Numbers of a delta."""
        return sum(self.sizes.values())

    def needed(self, clients: int) -> int:
        """How many of so many clients must reveal."""
        return max(clients // 2 + 1, math.ceil(self.share * clients - 1e-9))

    def require_sum(self, clients: int) -> None:
        """Before a round of so many clients. Raises UsageError A02 where it has one client, or its sum may wrap."""
        self.point.require_room(clients)
        require_majority(self.needed(clients), clients)

    def require_threshold(self, threshold: int, clients: int) -> None:
        """What a client asks of a round before it sends anything. Raises UsageError A02 as `require_sum`, A03 where
        fewer are to reveal than the recipe says."""
        self.point.require_room(clients)
        if threshold < (needed := self.needed(clients)):
            what = f"the server lets {threshold} of {clients} clients reveal; the recipe asks for {needed}"
            fix = "leave the round; the same federated.secure_threshold on both sides"
            raise UsageError(what, where="federated.secure_threshold", fix=fix, code="A03")

    def session(self, number: int) -> bytes:
        """The name of round `number`."""
        return b"run %d, round %d" % (self.seed, number)

    def encoded(self, delta: Tensor, client: int) -> Words:
        """delta float64 [d] in fixed point, uint64 [d]. Raises UsageError A01, with client and parameter, where a
        number is beyond the limit."""
        parts = delta.split(list(self.sizes.values()))
        named = {name: part.numpy() for name, part in zip(self.sizes, parts, strict=True)}
        return self.point.encode(named, client)

    def decoded(self, total: Words) -> Tensor:
        """A sum as numbers, float64 [d]."""
        return torch.from_numpy(self.point.decode(total))

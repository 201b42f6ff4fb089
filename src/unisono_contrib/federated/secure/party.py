"""A client's part in one secure round: what it replies to each of the four requests, in their order, once each."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from unisono.spec.errors import UsageError
from unisono_contrib.federated.secure.client import SecureClient
from unisono_contrib.federated.secure.fixed_point import Words
from unisono_contrib.federated.secure.messages import REQUESTS, Advertise, Mask, Reply, Request, Share
from unisono_contrib.federated.secure.terms import SecureTerms


@dataclass(slots=True)
class SecureParty:
    """client: its number, from 0. number: of the round. delta: float64 [d], which never leaves it unmasked."""

    client: int
    number: int
    terms: SecureTerms
    delta: Tensor
    _ends: SecureClient = field(init=False, repr=False)
    _words: Words = field(init=False, repr=False)
    _turn: int = 0

    def reply(self, request: Request) -> Reply:
        """Raises UsageError A01 where a number of the delta is beyond the limit; the others learn so before anybody has
        sent a vector. A02 where too few clients are left, A03 for a request that is not the next one."""
        if self._turn >= len(REQUESTS) or not isinstance(request, REQUESTS[self._turn]):
            what = f"client {self.client} is asked to {type(request).__name__.lower()} out of turn, or twice"
            fix = "a new round; a server that asks twice can see single updates"
            raise UsageError(what, where="federated.secure", fix=fix, code="A03")
        self._turn += 1
        if isinstance(request, Advertise):
            session = self.terms.session(self.number)
            self._ends = SecureClient(self.client + 1, request.threshold, session)
            return self._ends.advertise()
        if isinstance(request, Share):
            self._words = self._weighted(request)
            return self._ends.share(request.directory)
        if isinstance(request, Mask):
            return self._ends.mask(request.letters, self._words)
        return self._ends.reveal(request.survivors)

    def _weighted(self, request: Share) -> Words:
        """What is summed: the delta times what this client counts for."""
        self.terms.require_threshold(self._ends.threshold, len(request.directory))
        if not (math.isfinite(request.weight) and 0.0 < request.weight <= 1.0):
            what = f"client {self.client} is to count for {request.weight}, which is no share of a round"
            raise UsageError(what, where="federated.secure", fix="leave the round", code="A03")
        return self.terms.encoded(self.delta * request.weight, self.client)

"""What protects the clients of federated rounds: a bound and noise (`[privacy]`), and sums that hide single deltas
(`federated.secure`)."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.cohorts import RoundDraws
from unisono_contrib.federated.combine import Combiner
from unisono_contrib.federated.secure.client import SecureClient, require_majority
from unisono_contrib.federated.secure.fixed_point import FixedPoint
from unisono_contrib.federated.secure.server import directory_of, routed, survivors_of, total
from unisono_contrib.privacy.client import add_noise, clip_delta, sensitivity
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.noise import ACCOUNTANTS, noise_for
from unisono_contrib.privacy.stream import secret_of
from unisono_contrib.spec.federated import AGGREGATES


def combiner_of(recipe: Any, sizes: Mapping[str, int], drawn: RoundDraws) -> Combiner:
    """The aggregate of a resolved recipe with what protects its clients. sizes: numbers of each parameter of a delta,
    in its order. drawn: who is asked when. Raises UsageError A02, C02, C03, E01."""
    aggregate, config, section = (
        AGGREGATES.read(FederatedConfig.of(recipe).aggregate),
        FederatedConfig.of(recipe),
        recipe.privacy,
    )
    summed = None
    if config.secure:
        point = FixedPoint(config.secure_limit, config.secure_bits)
        summed = SimulatedSum(point, sizes, config.secure_threshold, recipe.seed)
        point.require_room(drawn.size)
        require_majority(summed.needed(drawn.size), drawn.size)
    if section is None:
        return Combiner(aggregate, total=summed)
    budget = budget_of(section, drawn, config.rounds)
    noise = noise_of(budget.noise, section.clip, secret_of(section.key, recipe.seed))
    clip = partial(clip_delta, bound=section.clip)
    return Combiner(aggregate, clip, noise, summed, budget.says)


def noise_of(noise: float, bound: float, key: bytes) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The noise of a round, drawn once, by the server: `noise` times how far one client moves the weighted mean."""

    def noised(delta: Tensor, shares: Tensor, number: int) -> Tensor:
        deviation = noise * sensitivity(bound, shares.tolist()) if noise else 0.0
        return add_noise(delta, deviation, key, number)

    return noised


@dataclass(frozen=True, slots=True)
class ClientBudget:
    """What the rounds reveal of any one client. A round reveals of the clients that it asks alone; who is asked when is
    no secret here, so that no chance of being asked makes epsilon smaller.

    often: by the number of rounds from 0, in how many of them the client was asked that was asked most."""

    noise: float
    delta: float
    accountant: str
    often: Sequence[int]

    def epsilon(self, rounds: int) -> float:
        """Of the first `rounds` rounds. inf without noise."""
        return _epsilon(self.accountant, self.noise, self.often[rounds], self.delta)

    def says(self, rounds: int) -> Mapping[str, float | None]:
        """For the line of metrics of the last of these rounds."""
        spent = self.epsilon(rounds)
        return {"epsilon": spent if math.isfinite(spent) else None}


@lru_cache(maxsize=64)
def _epsilon(accountant: str, noise: float, times: int, delta: float) -> float:
    return ACCOUNTANTS[accountant]([SampledGaussian(noise, 1.0, times)], delta)


def budget_of(section: Any, drawn: RoundDraws, rounds: int) -> ClientBudget:
    """Of a `[privacy]` section. The noise follows from target_epsilon where that is said."""
    noise, often = section.noise, most_asked(drawn, rounds)
    if noise is None:
        accountant = ACCOUNTANTS[section.accountant]
        noise = noise_for(section.target_epsilon, section.delta, 1.0, often[-1], accountant)
    return ClientBudget(noise, section.delta, section.accountant, often)


def most_asked(drawn: RoundDraws, rounds: int) -> list[int]:
    """[rounds + 1]: after so many rounds, how often the client was asked that was asked most."""
    counts, most = Counter[int](), [0]
    for number in range(rounds):
        cohort = drawn.cohort(number)
        counts.update(cohort)
        most.append(max([most[-1], *(counts[client] for client in cohort)]))
    return most


@dataclass(frozen=True, slots=True)
class SimulatedSum:
    """The sum of a round by the whole protocol, with all clients in this process: what a run under secure aggregation
    computes. It hides nothing here, where this process has all deltas.

    threshold: share of a round's clients that must reveal; at least more than half. sizes: of each parameter."""

    point: FixedPoint
    sizes: Mapping[str, int]
    threshold: float
    seed: int

    def needed(self, clients: int) -> int:
        """How many of so many clients must reveal."""
        return max(clients // 2 + 1, math.ceil(self.threshold * clients - 1e-9))

    def __call__(self, rows: Tensor, number: int) -> Tensor:
        """rows float64 [n, d] → their sum [d], a multiple of 2^-fraction_bits. Raises UsageError A01 where a number is
        beyond the limit, A02 for a single client."""
        n, session = len(rows), b"run %d, round %d" % (self.seed, number)
        needed = self.needed(n)
        clients = [SecureClient(i + 1, needed, session) for i in range(n)]
        vectors = [self.point.encode(self._named(row), i + 1) for i, row in enumerate(rows)]
        directory = directory_of((client.advertise() for client in clients), needed)
        letters = routed((client.share(directory) for client in clients), needed)
        masked = [c.mask(letters[c.client], x) for c, x in zip(clients, vectors, strict=True)]
        survivors = survivors_of(masked, needed)
        revealed = [client.reveal(survivors) for client in clients]
        return torch.from_numpy(self.point.decode(total(masked, revealed, directory, needed, session)))

    def _named(self, row: Tensor) -> dict[str, Any]:
        parts = row.split(list(self.sizes.values()))
        return {name: part.numpy() for name, part in zip(self.sizes, parts, strict=True)}

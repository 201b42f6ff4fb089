"""What protects the clients of federated rounds: a bound and noise (`[privacy]`), and sums that hide single deltas
(`federated.secure`)."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.clients import unchanged
from unisono_contrib.federated.cohorts import RoundDraws
from unisono_contrib.federated.combine import Combiner
from unisono_contrib.federated.secure.terms import SecureTerms
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
    secure = SecureTerms.of(config, sizes, recipe.seed)
    if secure is not None:
        secure.require_sum(drawn.size)
    if section is None:
        return Combiner(aggregate, secure=secure)
    budget = budget_of(section, drawn, config.rounds)
    noise = noise_of(budget.noise, section.clip, secret_of(section.key, recipe.seed))
    return Combiner(aggregate, clip_of(recipe), noise, secure, budget.says)


def clip_of(recipe: Any) -> Callable[[Tensor], Tensor]:
    """What each client bounds its delta by before anything of it leaves."""
    section = recipe.privacy
    return unchanged if section is None else partial(clip_delta, bound=section.clip)


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

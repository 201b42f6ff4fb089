"""Clients with other shares of the classes (Hsu et al., "Measuring the effects of non-identical data", 2019; by class
as Yurochkin et al., "Bayesian nonparametric federated learning", 2019)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono.spec.training import Natural, Positive
from unisono_contrib.spec.federated import SampleSplit

if TYPE_CHECKING:
    import numpy as np

_TRIES = 1000


class DirichletSplit(SampleSplit):
    """Each class is cut among the clients in shares drawn from a Dirichlet distribution."""

    name: ClassVar[str] = "dirichlet"
    main: ClassVar[str] = "alpha"
    by_class: ClassVar[bool] = True

    alpha: Positive = Field(
        default=0.5, description="concentration: 100 is nearly iid, 0.1 a few classes a client"
    )
    least: Natural = Field(default=1, description="samples that each client has at least; else drawn again")

    def assign(
        self, samples: int, classes: "np.ndarray | None", clients: int, seed: int
    ) -> "Sequence[np.ndarray]":
        import numpy as np

        from unisono_contrib.federated.draws import generator

        if classes is None:
            raise ValueError("a split by class needs classes")
        draw = generator(seed, "split")
        for _ in range(_TRIES):
            parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
            for number in np.unique(classes):
                members = draw.permutation(np.flatnonzero(classes == number))
                shares = draw.dirichlet(np.full(clients, self.alpha))
                cuts = (np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
                for client, part in enumerate(np.split(members, cuts)):
                    parts[client].append(part)
            split = [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
            if min(map(len, split)) >= self.least:
                return split
        raise UsageError(
            f"of {_TRIES} splits of {samples:,} samples among {clients} clients by dirichlet:alpha={self.alpha:g}, none"
            f" left each client at least {self.least}",
            where="federated.split",
            fix="a larger alpha, fewer clients, or dirichlet:least=0: a client without samples is never asked",
            code="C06",
        )

"""Constants of single kernels, of a node's bus and of the allocator, fitted to what was measured of each alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from unisono.planner.machines.chip import chip, matmul
from unisono.planner.machines.cluster import Device
from unisono.planner.stack import Stack


@dataclass(frozen=True, slots=True)
class MeasuredProduct:
    """One measured product (rows x inner) (inner x columns), `batch` of them, in half precision; `calibrate.fit` takes
    it as it takes a step."""

    device: Device
    rows: int
    inner: int
    columns: int
    batch: int
    seconds: float

    def predicted(self, stack: Stack) -> float:
        return matmul(chip(self.device, stack, "bf16", 2), self.rows, self.inner, self.columns, self.batch)


@dataclass(frozen=True, slots=True)
class Ring:
    """All-reduces of one kind of node. base: seconds that even the smallest takes; hop: seconds for each member that
    the way round passes; bus: (members, bytes/s)."""

    base: float
    hop: float
    bus: tuple[tuple[int, float], ...]

    def seconds(self, members: int, moved: float) -> float:
        """Seconds to sum `moved` bytes in a measured size of group."""
        return self.base + 2 * (members - 1) * (self.hop + moved / members / dict(self.bus)[members])


def rings(measured: Sequence[tuple[int, float, float]]) -> Ring:
    """From (members, bytes, seconds) of two sizes of group: latency and bus of each by least squares of relative
    errors, and the latencies as a line over the members."""
    alphas, buses = [], []
    sizes = sorted({members for members, _, _ in measured})
    for size in sizes:
        moved, seconds = np.array([row[1:] for row in measured if row[0] == size]).T
        ways = np.stack([np.ones_like(moved), 2 * (size - 1) / size * moved], axis=1) / seconds[:, None]
        alpha, beta = np.linalg.lstsq(ways, np.ones_like(moved), rcond=None)[0]
        alphas.append(float(alpha))
        buses.append((size, 1.0 / float(beta)))
    hop = (alphas[-1] - alphas[0]) / (2 * (sizes[-1] - sizes[0]))
    return Ring(alphas[0] - 2 * (sizes[0] - 1) * hop, hop, tuple(buses))


def slack(pairs: Sequence[tuple[float, float]]) -> float:
    """What the allocator holds beside what was asked for, as a share of that: (asked for, held) of measured runs."""
    return median(held / asked - 1.0 for asked, held in pairs)


def fused_attention(shares: Sequence[float]) -> float:
    """Share of peak of fused attention, from measured shares that count the masked half of the scores too."""
    return median(shares) / 2

"""Who hears whom in a round of gossip, and how much that counts: mixing matrices, as pure functions.

Row i of a matrix says what replica i becomes: the sum of `weight · weights of replica j` over the j that it hears,
itself among them. Weights are fractions, so that rows and columns that shall add up to 1 do so exactly.

In every graph but `random`, columns add up to 1 as rows do, so that mixing keeps the mean of all replicas. Undirected
ones (ring, torus, star, complete, pairs) are symmetric, with the weights of Metropolis (Xiao and Boyd 2004).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import isqrt
from random import Random
from statistics import fmean
from typing import Literal

import numpy as np

from unisono.spec.work import Durations
from unisono_contrib.sync._local import lock_step, played

Graph = Literal["ring", "torus", "exponential", "one_peer", "complete", "star", "pairs", "random"]
Row = Mapping[int, Fraction]
Matrix = Sequence[Row]
"""Row i: replica j → its weight in what replica i becomes; none is 0."""

SEEDED = ("pairs", "random")
"""Graphs that are drawn anew for each round."""
FIXED = ("ring", "torus", "exponential", "complete", "star")
"""Graphs that are the same in all rounds."""


@dataclass(frozen=True, slots=True)
class Beat:
    """When replicas talk. graph: who then hears whom. h: steps from one round to the next. report: steps from one
    meeting of all to the next."""

    graph: Graph
    h: int = 1
    report: int = 16

    def round_after(self, step: int) -> int | None:
        """The number of the round that step `step` (from 0) ends with; None for a step that ends with none."""
        return None if (step + 1) % self.h else (step + 1) // self.h - 1


def pace_of(beat: Beat, durations: Durations, inside: int) -> float:
    """Mean time of a step where a replica waits, at the end of a round, for those that it hears; `sync.Policy.pace`."""
    steps = played(durations)
    replicas = lock_step([each[:steps] for each in durations], inside)
    n, now = len(replicas), [0.0] * len(replicas)
    fixed = mixing(beat.graph, n) if beat.graph in FIXED else None
    for step, took in enumerate(zip(*replicas, strict=True)):
        now = [since + more for since, more in zip(now, took, strict=True)]
        if (step + 1) % beat.report == 0:
            now = [max(now)] * n
        elif (number := beat.round_after(step)) is not None:
            now = [max(now[j] for j in row) for row in fixed or mixing(beat.graph, n, number)]
    return fmean(now) / steps


def mixing(graph: Graph, n: int, number: int = 0, seed: int = 0) -> Matrix:
    """The matrix of n replicas in round `number`. seed: of what is drawn, alike on all replicas."""
    match graph:
        case "ring":
            return metropolis(n, {_edge(i, (i + 1) % n) for i in range(n)})
        case "torus":
            return metropolis(n, _torus(n))
        case "complete":
            return metropolis(n, set(combinations(range(n), 2)))
        case "star":
            return metropolis(n, {(0, i) for i in range(1, n)})
        case "pairs":
            return metropolis(n, set(pairs(n, number, seed)))
        case "exponential":
            return _circulant(n, hops(n))
        case "one_peer":
            reach = hops(n)
            return _circulant(n, reach[number % len(reach) :][:1] if reach else [])
        case "random":
            return _thrown(n, number, seed)


def metropolis(n: int, edges: Collection[tuple[int, int]]) -> Matrix:
    """Symmetric: each edge counts 1 / (1 + the larger number of neighbours of its two ends), and a replica keeps what
    its edges leave. An edge from a replica to itself is none."""
    edges = {edge for edge in edges if edge[0] != edge[1]}
    degree = Counter(end for edge in edges for end in edge)
    rows: list[dict[int, Fraction]] = [{} for _ in range(n)]
    for i, j in sorted(edges):
        rows[i][j] = rows[j][i] = Fraction(1, 1 + max(degree[i], degree[j]))
    for i, row in enumerate(rows):
        if left := 1 - sum(row.values(), Fraction(0)):
            row[i] = left
    return rows


def hops(n: int) -> list[int]:
    """1, 2, 4, … below n: how far the messages of an exponential graph go (Assran et al. 2019; Ying et al. 2021)."""
    return [1 << k for k in range((n - 1).bit_length())]


def pairs(n: int, number: int, seed: int) -> list[tuple[int, int]]:
    """All replicas in pairs, drawn for a round; of an odd number, one is in none."""
    order = list(range(n))
    Random(f"pairs {seed} {number}").shuffle(order)
    return [_edge(i, j) for i, j in zip(order[::2], order[1::2], strict=False)]


def sides(n: int) -> tuple[int, int]:
    """Rows and columns of a torus of n replicas, as near to a square as n has factors. With a prime n it has one row,
    and is a ring."""
    rows = next(a for a in range(isqrt(n), 0, -1) if n % a == 0)
    return rows, n // rows


def heard_by(matrix: Matrix, j: int) -> list[int]:
    """The other replicas that hear replica j, in order."""
    return [i for i, row in enumerate(matrix) if j in row and i != j]


def most_messages(graph: Graph, n: int) -> int:
    """How many others a replica tells its weights in a round, at most."""
    if graph in SEEDED:
        return 1 if n > 1 else 0
    return max(len(heard_by(mixing(graph, n), j)) for j in range(n))


def spectral_gap(graph: Graph, n: int, seed: int = 0) -> float:
    """1 minus the factor by which a round shrinks the distance from consensus, in the geometric mean: from 0, never, to
    1, all at once. Rounds: one of a graph that is always the same, all of a one-peer graph, 16 of one that is drawn."""
    rounds = 16 if graph in SEEDED else max(1, len(hops(n))) if graph == "one_peer" else 1
    product = np.eye(n)
    for number in range(rounds):
        product = dense(mixing(graph, n, number, seed)) @ product
    heard = product / product.sum(1, keepdims=True)  # of push-sum: weights without their bias
    norm = float(np.linalg.norm(heard - heard.mean(0), 2))
    return 1.0 - (0.0 if norm < 1e-12 else norm ** (1.0 / rounds))


def dense(matrix: Matrix) -> "np.ndarray":
    """float64 [n, n]."""
    full = np.zeros((len(matrix), len(matrix)))
    for i, row in enumerate(matrix):
        for j, weight in row.items():
            full[i, j] = float(weight)
    return full


def _torus(n: int) -> set[tuple[int, int]]:
    rows, columns = sides(n)
    edges = set()
    for i in range(n):
        row, column = divmod(i, columns)
        edges.add(_edge(i, row * columns + (column + 1) % columns))
        edges.add(_edge(i, (row + 1) % rows * columns + column))
    return edges


def _circulant(n: int, reach: Sequence[int]) -> Matrix:
    """Each replica hears those `reach` before it, all alike."""
    weight = Fraction(1, 1 + len(reach))
    return [{(i - hop) % n: weight for hop in (0, *reach)} for i in range(n)]


def _thrown(n: int, number: int, seed: int) -> Matrix:
    """Each replica gives half of its own to one other, whoever else does: columns add up to 1, rows need not."""
    draw, half = Random(f"random {seed} {number}"), Fraction(1, 2)
    rows: list[dict[int, Fraction]] = [{i: half if n > 1 else Fraction(1)} for i in range(n)]
    for j in range(n) if n > 1 else ():
        rows[(j + 1 + draw.randrange(n - 1)) % n][j] = half
    return rows


def _edge(i: int, j: int) -> tuple[int, int]:
    return (min(i, j), max(i, j))

"""What every split owes: each sample has one client, the same one on any machine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unisono_contrib.spec.federated import SampleSplit

_SAMPLES, _CLIENTS, _CLASSES = 600, 6, 5


def faults(member: SampleSplit, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a split, a sentence each: 1. Each sample is with exactly one client, unless clients have data
    of their own. 2. Numbers are int64, ascending. 3. The same seed gives the same split, another one another."""
    classes = np.arange(_SAMPLES, dtype=np.int64) % _CLASSES
    first, again, other = (
        [*member.assign(_SAMPLES, classes.copy(), _CLIENTS, seed)] for seed in (1, 1, 2)
    )  # fmt: skip
    if len(first) != _CLIENTS:
        yield f"among {_CLIENTS} clients it makes {len(first)} parts"
        return
    if any(part.dtype != np.int64 or not (np.diff(part) > 0).all() for part in first):
        yield "a client's samples are not int64 and ascending"
    if not member.apart and not np.array_equal(np.sort(np.concatenate(first)), np.arange(_SAMPLES)):
        yield "not each sample is with exactly one client"
    if not all(map(np.array_equal, first, again)):
        yield "the same seed gives another split"
    if not member.apart and all(map(np.array_equal, first, other)):
        yield "another seed gives the same split"

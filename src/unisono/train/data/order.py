"""Which sample comes when: a pseudo-random order that is computed, never stored.

The samples of a run stand in one endless line. Position p belongs to epoch p // samples, and inside an epoch
every sample occurs once, in an order that seed and epoch decide. Because the order is a function, any rank can
ask for any stretch of it, and the whole state of the data is one integer: the position, or the step.

The permutation is a Feistel network over the rectangle a x b of nearly square sides that holds all samples,
walked until the value falls among the samples (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). The rectangle exceeds the number of samples by less than one side, so walking is rare.
The orders are fixed for good: a test holds golden values, for a change would reshuffle everybody's runs.
"""

from math import isqrt

import numpy as np

_ROUNDS = 6
_DOMAIN = 0x6F72646572  # "order": keeps these keys apart from other uses of the same seed
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S16 = (np.uint64(n) for n in (27, 30, 31, 16))


def sample_ids(seed: int, first: int, count: int, samples: int) -> np.ndarray:
    """Dataset indices of the global positions first .. first + count - 1: int64, [count]."""
    return samples_at(seed, np.arange(first, first + count, dtype=np.int64), samples)


def samples_at(seed: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Dataset indices of any global positions (int64, any order, [n]): int64 [n], each in 0 .. samples - 1.

    Raises ValueError for a negative position or a dataset without samples.
    """
    if samples < 1:
        raise ValueError(f"a dataset of {samples} samples has no order")
    if positions.size == 0:
        return positions.astype(np.int64)
    if int(positions.min()) < 0:
        raise ValueError("positions count from 0")
    line = positions.astype(np.uint64)
    size = np.uint64(samples)
    epoch = line // size
    if epoch[0] == epoch[-1] and bool((epoch == epoch[0]).all()):
        epoch = epoch[:1]  # one key for all: the usual case
    return _permute(line % size, _round_keys(seed, epoch), samples).astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): each bit of x touches all of the result."""
    x = (x ^ (x >> _S30)) * _MULTIPLY_1
    x = (x ^ (x >> _S27)) * _MULTIPLY_2
    return x ^ (x >> _S31)


def _round_keys(seed: int, epoch: np.ndarray) -> np.ndarray:
    """One key per round and epoch: uint64 [_ROUNDS, len(epoch)]."""
    start = np.array([(seed ^ (_DOMAIN << 20)) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    of_epoch = mix(mix(start + _GOLDEN) ^ (epoch * _GOLDEN))
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    return mix(of_epoch[None, :] + rounds * _GOLDEN)


def _permute(values: np.ndarray, keys: np.ndarray, samples: int) -> np.ndarray:
    """A bijection of 0 .. samples - 1, applied to each value under its column of keys."""
    rows = isqrt(samples - 1) + 1
    columns = -(-samples // rows)
    out = _scramble(values, keys, rows, columns)
    outside = out >= samples
    while outside.any():
        own_keys = keys[:, outside] if keys.shape[1] > 1 else keys
        out[outside] = _scramble(out[outside], own_keys, rows, columns)
        outside = out >= samples
    return out


def _scramble(values: np.ndarray, keys: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The network on 0 .. rows * columns - 1: each round shifts one coordinate by a hash of the other."""
    a, b = np.uint64(rows), np.uint64(columns)
    row, column = values // b, values % b
    for r in range(0, _ROUNDS, 2):
        # 48 bits of hash: the sum cannot overflow, which would break the bijection.
        row = (row + (mix(column ^ keys[r]) >> _S16)) % a
        column = (column + (mix(row ^ keys[r + 1]) >> _S16)) % b
    return row * b + column

"""What a federated run draws: functions of the seed, a purpose and whole numbers, the same on any machine."""

import zlib

import numpy as np

from unisono.train.data.order import mix, samples_at

_MASK = (1 << 64) - 1


def key(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed of its own for each purpose, such as ("cohort", round)."""
    x = np.array([(seed ^ zlib.crc32(purpose.encode()) << 32) & _MASK], dtype=np.uint64)
    for number in numbers:
        x = mix(mix(x) ^ np.array([number & _MASK], dtype=np.uint64))
    return int(mix(x)[0] >> np.uint64(1))


def uniform(seed: int, purpose: str, *numbers: int) -> float:
    """A number in [0, 1)."""
    return (key(seed, purpose, *numbers) >> 10) * 2.0**-53


def chosen(seed: int, purpose: str, count: int, among: int, *numbers: int) -> list[int]:
    """`count` different whole numbers below `among`, each as likely as any other."""
    return samples_at(key(seed, purpose, *numbers), np.arange(count, dtype=np.int64), among).tolist()


def generator(seed: int, purpose: str) -> np.random.RandomState:
    """For distributions. numpy promises that the numbers of a `RandomState` never change (NEP 19)."""
    return np.random.RandomState(np.random.MT19937(key(seed, purpose) & 0xFFFFFFFF))

"""How close a technique comes to one device: the word that `verify` holds it to."""

from enum import IntEnum


class Fidelity(IntEnum):
    """EXACT: the same bits. ROUNDING: the same up to the order of summation. LOSSY: a named bound."""

    LOSSY = 0
    ROUNDING = 1
    EXACT = 2

"""Maximum, minimum and choice of numbers or of arrays of them, so that one formula prices one plan or a million.

`float` in the signatures of formulas that use these stands for a number or an array; numpy is imported for arrays
alone.
"""

from math import ceil

_PLAIN = (bool, int, float)


def larger(a: float, b: float) -> float:
    """The larger, element by element."""
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return max(a, b)
    import numpy as np

    return np.maximum(a, b)


def smaller(a: float, b: float) -> float:
    """The smaller, element by element."""
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return min(a, b)
    import numpy as np

    return np.minimum(a, b)


def either(which: bool, yes: float, no: float) -> float:
    """`yes` where `which` holds, `no` elsewhere."""
    if isinstance(which, _PLAIN):
        return yes if which else no
    import numpy as np

    return np.where(which, yes, no)


def whole(a: float) -> float:
    """The next whole number that is no smaller."""
    if isinstance(a, _PLAIN):
        return float(ceil(a))
    import numpy as np

    return np.ceil(a)


def largest(a: float) -> float:
    """Of all its elements."""
    if isinstance(a, _PLAIN):
        return float(a)
    import numpy as np

    return float(np.max(a))

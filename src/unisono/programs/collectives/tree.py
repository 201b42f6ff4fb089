"""A binomial tree: as few rounds as the number of ranks has binary digits, and whole vectors in each. For small ones.

An all-to-all goes by the digits of the distance between two ranks (Bruck et al., 1997): as few rounds, each of about
half of what a rank holds.
"""

from unisono.programs.collectives import Move, Program, Rounds, backwards, completed, placed


def program(op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
    """An operation of `size` ranks."""
    inward = {
        "reduce": reduce,
        "gather": gather,
        "reduce_scatter": lambda n: reduce(n) + backwards(gather(n)),
        "all_reduce": lambda n: reduce(n) + backwards(reduce(n)),
        "all_to_all": all_to_all,
    }
    return placed(op, size, completed(op, size, inward), root)


def _far(size: int) -> list[int]:
    """1, 2, 4, ... below `size`."""
    return [1 << digit for digit in range((size - 1).bit_length())]


def reduce(size: int) -> Rounds:
    """In round k, ranks whose lowest digit is the k-th send all that they have to the rank without it."""
    return tuple(
        tuple(Move(i, i - far, tuple(range(size)), True) for i in range(far, size, 2 * far))
        for far in _far(size)
    )


def gather(size: int) -> Rounds:
    """The same tree, in which each sends the blocks of its branch."""
    return tuple(
        tuple(Move(i, i - far, tuple(range(i, min(i + far, size)))) for i in range(far, size, 2 * far))
        for far in _far(size)
    )


def all_to_all(size: int) -> Rounds:
    """In round k each chunk whose distance has the k-th digit goes 2^k ranks further."""
    return tuple(
        tuple(Move(at, (at + far) % size, tuple(sorted(_passing(at, far, size)))) for at in range(size))
        for far in _far(size)
    )


def _passing(at: int, far: int, size: int) -> list[int]:
    """Chunks that leave rank `at` in the round of `far`: they have come as far as the lower digits of their way say."""
    ways = [way for way in range(1, size) if way & far]
    begun = [(way, (at - (way & (far - 1))) % size) for way in ways]
    return [source * size + (source + way) % size for way, source in begun]

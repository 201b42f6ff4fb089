"""Everybody sends to everybody at once: one round, or two for an all-reduce. The fewest waits, and the most
messages."""

from unisono.programs.collectives import Move, Program, Rounds, completed, placed


def program(op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
    """An operation of `size` ranks."""
    inward = {
        "reduce": _reduce,
        "gather": _gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
    return placed(op, size, completed(op, size, inward), root)


def _reduce(size: int) -> Rounds:
    return (tuple(Move(i, 0, tuple(range(size)), True) for i in range(1, size)),)


def _gather(size: int) -> Rounds:
    return (tuple(Move(i, 0, (i,)) for i in range(1, size)),)


def _reduce_scatter(size: int) -> Rounds:
    # Each begins with its neighbour, so that not all of them send to rank 0 first.
    return (
        tuple(Move(i, (i + t) % size, ((i + t) % size,), True) for t in range(1, size) for i in range(size)),
    )


def _all_to_all(size: int) -> Rounds:
    return (tuple(Move(i, j, (i * size + j,)) for i, j in _shifted(size)),)


def _shifted(size: int) -> list[tuple[int, int]]:
    return [(i, (i + t) % size) for t in range(1, size) for i in range(size)]

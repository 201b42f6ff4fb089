"""Recursive halving and doubling (Thakur, Rabenseifner and Gropp, 2005): as few bytes as a ring and as few rounds as a
tree, where the number of ranks is a power of two. Others fold: as many ranks as are too many hand all they have to a
neighbour first, and get their part from it at last.
"""

from unisono.programs.collectives import Move, Program, Rounds, backwards, completed, placed, tree


def program(op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
    """An operation of `size` ranks. A reduce is a reduce-scatter and a gather (Rabenseifner, 2004), a broadcast a
    scatter and an all-gather."""
    inward = {
        "reduce": lambda n: reduce_scatter(n) + tree.gather(n),
        "gather": tree.gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": lambda n: _fold(n) + _halved(n) + backwards(_halved(n)) + backwards(_fold(n)),
        "all_to_all": tree.all_to_all,
    }
    return placed(op, size, completed(op, size, inward), root)


def reduce_scatter(size: int) -> Rounds:
    """Fold, halve, and hand out the blocks of those that were folded."""
    handed = tuple(Move(2 * v, 2 * v + 1, (2 * v + 1,)) for v in range(_extra(size)))
    return _fold(size) + _halved(size) + ((handed,) if handed else ())


def _extra(size: int) -> int:
    """Ranks above the largest power of two."""
    return size - (1 << (size.bit_length() - 1))


def _fold(size: int) -> Rounds:
    extra = _extra(size)
    moves = tuple(Move(2 * v + 1, 2 * v, tuple(range(size)), True) for v in range(extra))
    return (moves,) if moves else ()


def _halved(size: int) -> Rounds:
    """Each of those that stay sends the half that is not its own to the one half as far as the last time."""
    extra, stay = _extra(size), size - _extra(size)
    rank = [2 * v if v < extra else v + extra for v in range(stay)]
    first = [*rank, size]  # the blocks of v are those from first[v] to first[v + 1]
    rounds, far = [], stay // 2
    while far:
        rounds.append(
            tuple(
                Move(rank[v], rank[v ^ far], tuple(range(first[half], first[half + far])), True)
                for v in range(stay)
                for half in [(v ^ far) & -far]
            )
        )
        far //= 2
    return tuple(rounds)

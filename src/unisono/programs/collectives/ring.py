"""Every rank sends to the next one alone (Patarasuk and Yuan, 2009): no algorithm sends fewer bytes, and a rank needs
one fast link; but rounds grow with the number of ranks."""

from unisono.programs.collectives import Move, Program, Rounds, among, backwards, completed, placed


def program(op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
    """An operation of `size` ranks. pieces: into which what is broadcast or reduced is cut, so that a rank passes
    one on while the next one comes."""
    if op in ("reduce", "broadcast"):
        rounds = reduce(size, pieces)
        turned = among(rounds, [(root + i) % size for i in range(size)], [(p,) for p in range(pieces)])
        return Program(op, size, pieces, turned if op == "reduce" else backwards(turned), root)
    inward = {"gather": gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all}
    return placed(op, size, completed(op, size, inward), root)


def reduce(size: int, pieces: int = 1) -> Rounds:
    """Along a chain that ends in rank 0, piece behind piece."""
    return tuple(
        tuple(
            Move(i, i - 1, (turn - (size - 1 - i),), True)
            for i in range(1, size)
            if 0 <= turn - (size - 1 - i) < pieces
        )
        for turn in range(size - 1 + pieces - 1 if size > 1 else 0)
    )


def gather(size: int) -> Rounds:
    """Along the same chain; each rank passes on what comes from behind."""
    return tuple(
        tuple(Move(i, i - 1, (i + turn,)) for i in range(1, size - turn)) for turn in range(size - 1)
    )


def reduce_scatter(size: int) -> Rounds:
    """Block b leaves rank b + 1 and goes round until it comes to rank b, with everybody's added."""
    return tuple(
        tuple(Move(i, (i + 1) % size, ((i - turn - 1) % size,), True) for i in range(size))
        for turn in range(size - 1)
    )


def all_to_all(size: int) -> Rounds:
    """In round t to the rank t further: each round is a ring of that stride, and nothing travels twice."""
    return tuple(
        tuple(Move(i, (i + t) % size, (i * size + (i + t) % size,)) for i in range(size))
        for t in range(1, size)
    )

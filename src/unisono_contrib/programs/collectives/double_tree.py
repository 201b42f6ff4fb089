"""Two binary trees, each for one half of the vector (Sanders, Speck and Traeff, 2009), piece behind piece.

Who is inside one tree is a leaf of the other, so every rank sends and receives about as much as every other one, and
the rounds grow as slowly as a tree's. Only a broadcast, a reduce and an all-reduce are two trees; else a binomial one.
"""

from unisono.programs.collectives import Move, Program, Rounds, backwards, tree

Parents = dict[int, int]  # child → parent; the root is the one that is no child


def program(op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
    """An operation of `size` ranks. pieces: into which each half is cut."""
    if op not in ("broadcast", "reduce", "all_reduce") or size == 1:
        return tree.program(op, size, root)
    chunks = 2 * pieces
    if op == "all_reduce":
        return Program(op, size, chunks, _scheduled(trees(size), size, pieces, there_and_back=True))
    # The root stands outside, and hands each tree its half.
    others = [(root + i) % size for i in range(1, size)]
    both: list[Parents] = []
    for half in trees(size - 1):
        top = next(i for i in range(size - 1) if i not in half)
        both.append({others[i]: others[half[i]] if i in half else root for i in [*half, top]})
    rounds = _scheduled(both, size, pieces, there_and_back=False)
    return Program(op, size, chunks, rounds if op == "reduce" else backwards(rounds), root)


def trees(size: int) -> list[Parents]:
    """Two trees over `size` ranks; the second is the first in a mirror, or turned by one where that changes nothing."""
    first = {i: _parent(i, size) for i in range(1, size)}
    turned = [size - 1 - i if size % 2 == 0 else (i + 1) % size for i in range(size)]
    return [first, {turned[child]: turned[parent] for child, parent in first.items()}]


def _parent(rank: int, size: int) -> int:
    """In a tree whose inner ranks have even numbers: the digit above the lowest one is set, if there is such a rank."""
    low = rank & -rank
    above = (rank ^ low) | (low << 1)
    return above if above < size else rank ^ low


def _scheduled(both: list[Parents], size: int, pieces: int, *, there_and_back: bool) -> Rounds:
    """Moves up both trees, and down again, as early as they can be; a rank sends one and receives one in a round."""
    todo = [
        (piece, half, up, child)
        for piece in range(pieces)
        for up in ((True, False) if there_and_back else (True,))
        for half in range(2)
        for child in both[half]
    ]
    todo.sort(key=lambda task: (not task[2], task[0]))  # what waits longest for others goes first
    done: set[tuple[int, int, bool, int]] = set()
    children = [{rank: [c for c in tree if tree[c] == rank] for rank in range(size)} for tree in both]
    rounds: list[tuple[Move, ...]] = []

    def ready(piece: int, half: int, up: bool, child: int) -> bool:
        """Whether the sender has all that it is to send."""
        rank = child if up else both[half][child]
        if up or rank not in both[half]:
            return all((piece, half, True, other) in done for other in children[half][rank])
        return (piece, half, False, rank) in done

    while todo:
        sending, receiving, now, later = set[int](), set[int](), [], []
        for task in todo:
            piece, half, up, child = task
            parent = both[half][child]
            source, to = (child, parent) if up else (parent, child)
            if source in sending or to in receiving or not ready(*task):
                later.append(task)
                continue
            sending.add(source)
            receiving.add(to)
            now.append((task, Move(source, to, (half * pieces + piece,), up)))
        done.update(task for task, _ in now)
        rounds.append(tuple(move for _, move in now))
        todo = later
    return tuple(rounds)

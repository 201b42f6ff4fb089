"""Whether a program does its operation: every contribution once, in its place, and nobody sends what it does not have.

A program cannot deadlock if it passes: a move is one value for both ends, and what it sends is there when its round
begins, so rounds follow each other on every rank.
"""

from collections.abc import Iterator

from unisono.programs.collectives import OPS, Move, Program, held_at_first, owed_at_last

_Buffer = dict[int, frozenset[int]]  # chunk → whose contributions are in it


def check(program: Program) -> list[str]:
    """Everything wrong with a program, a sentence each; an empty list if it does what its `op` says."""
    if program.op not in OPS:
        return [f"{program.op} is no collective: {' '.join(OPS)}"]
    unit = program.size**2 if program.op == "all_to_all" else program.size
    if program.op not in ("broadcast", "reduce", "all_reduce") and program.chunks % unit:
        return [f"{program.chunks} chunks are no equal blocks of {unit}"]
    held: list[_Buffer] = [
        dict.fromkeys(held_at_first(program, rank), frozenset({rank})) for rank in range(program.size)
    ]
    problems: list[str] = []
    for number, moves in enumerate(program.rounds):
        faults = [*_strange(program, moves), *_clashes(moves)]
        problems += [f"round {number}: {fault}" for fault in faults or _played(held, moves)]
        if problems:
            return problems
    for rank in range(program.size):
        for chunk, owed in owed_at_last(program, rank).items():
            if (got := held[rank].get(chunk, frozenset[int]())) != owed:
                problems.append(
                    f"at the end rank {rank} has of chunk {chunk} the part of {_words(got)}, not of {_words(owed)}"
                )
    return problems


def _strange(program: Program, moves: tuple[Move, ...]) -> Iterator[str]:
    for move in moves:
        if not {move.source, move.to} <= set(range(program.size)) or move.source == move.to:
            yield f"a move from rank {move.source} to rank {move.to} of {program.size}"
        if not move.chunks or not set(move.chunks) <= set(range(program.chunks)):
            yield f"a move of chunks {move.chunks} of {program.chunks}"


def _clashes(moves: tuple[Move, ...]) -> Iterator[str]:
    """A chunk that is overwritten while it leaves, or by two."""
    sent = {(move.source, chunk) for move in moves for chunk in move.chunks}
    copied: set[tuple[int, int]] = set()
    touched: set[tuple[int, int]] = set()
    for move in moves:
        for place in ((move.to, chunk) for chunk in move.chunks):
            if (not move.adds and place in sent) or place in copied or (not move.adds and place in touched):
                yield f"rank {move.to} overwrites chunk {place[1]} while it is in use"
            touched.add(place)
            if not move.adds:
                copied.add(place)


def _played(held: list[_Buffer], moves: tuple[Move, ...]) -> list[str]:
    """Makes the moves of a round; what is wrong with them."""
    problems = []
    before = [dict(buffer) for buffer in held]
    for move in moves:
        for chunk in move.chunks:
            part = before[move.source].get(chunk)
            there = held[move.to].get(chunk, frozenset[int]())
            if part is None:
                problems.append(f"rank {move.source} sends chunk {chunk}, which it does not have")
            elif move.adds and part & there:
                problems.append(
                    f"rank {move.to} adds the part of {_words(part & there)} to chunk {chunk} twice"
                )
            elif move.adds and not there:
                problems.append(f"rank {move.to} adds to chunk {chunk}, of which it has nothing")
            else:
                held[move.to][chunk] = part | there if move.adds else part
    return problems


def _words(ranks: frozenset[int]) -> str:
    return f"ranks {', '.join(map(str, sorted(ranks)))}" if ranks else "nobody"

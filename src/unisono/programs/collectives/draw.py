"""Programs as text and as pictures: which chunks go where in which round."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from unisono.programs.collectives import Move, Program

_STEP, _LINE, _LEFT, _TOP = 120, 44, 70, 40
_COLOURS = {True: "#b3541e", False: "#1e6bb3"}


def text(program: Program) -> str:
    """One line a rank, one column a round: `+2>1` sends chunk 2 to rank 1, which adds it; `=` has it copied.

    Messages of one rank in one round stand behind each other, and a run of chunks as `0-3`.
    """
    cells = [
        [
            " ".join(
                f"{'+' if move.adds else '='}{spans(move.chunks)}>{move.to}"
                for move in moves
                if move.source == rank
            )
            or "."
            for moves in program.rounds
        ]
        for rank in range(program.size)
    ]
    heads = [f"round {number}" for number in range(len(program.rounds))]
    wide = [max(len(head), *(len(line[i]) for line in cells)) for i, head in enumerate(heads)]
    first = len(f"rank {program.size - 1}")
    lines = [[" " * first, *(head.ljust(w) for head, w in zip(heads, wide, strict=True))]]
    for rank, line in enumerate(cells):
        lines.append([f"rank {rank}".ljust(first), *(c.ljust(w) for c, w in zip(line, wide, strict=True))])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def spans(chunks: Sequence[int]) -> str:
    """Numbers in few letters: `0-3,6`."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk - 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def svg(program: Program) -> str:
    """A picture: a line for each rank, time from left to right, an arrow for each move with its chunks; brown where it
    is added, blue where it is copied."""
    wide = 2 * _LEFT + _STEP * max(1, len(program.rounds))
    high = 2 * _TOP + _LINE * (program.size - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" '
        f'font-size="11" role="img"><title>{escape(program.op)} of {program.size} ranks, '
        f"{len(program.rounds)} rounds</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for colour in _COLOURS.values():
        parts.append(
            f'<marker id="a{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        )
    for rank in range(program.size):
        y = _TOP + rank * _LINE
        parts.append(f'<text x="8" y="{y + 4}">rank {rank}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{wide - _LEFT}" y2="{y}" stroke="#ccc"/>')
    for number in range(len(program.rounds)):
        parts.append(f'<text x="{_LEFT + number * _STEP + 6}" y="16" fill="#777">round {number}</text>')
    parts += [_arrow(number, move) for number, moves in enumerate(program.rounds) for move in moves]
    return "\n".join([*parts, "</svg>\n"])


def _arrow(number: int, move: Move) -> str:
    x1, x2 = _LEFT + number * _STEP + 8, _LEFT + (number + 1) * _STEP - 12
    y1, y2 = (_TOP + rank * _LINE for rank in (move.source, move.to))
    colour = _COLOURS[move.adds]
    # The words stand nearer to the sender, where arrows have not met yet.
    x, y = x1 + 0.22 * (x2 - x1), y1 + 0.22 * (y2 - y1) - 3
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.4" '
        f'marker-end="url(#a{colour[1:]})"/><text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{spans(move.chunks)}</text>'
    )

"""Timetables as text, for terminals and documents; the report draws the same placed actions as pictures."""

from collections.abc import Sequence

from unisono.programs.pipeline import Placed


def text(placed: Sequence[Placed]) -> str:
    """One line per row; a column is the shortest action's time, dots are idle time.

    Blocks are named by kind and micro-batch (`F0`), and by stage too where a row owns several (`F0/2`).
    """
    if not placed:
        return ""
    several = several_stages(placed)
    rows = 1 + max(p.row for p in placed)
    column = min(p.stop - p.start for p in placed if p.stop > p.start)
    begin = min(p.start for p in placed)
    cells = 1 + max(len(_name(p, several)) for p in placed)
    columns = round((max(p.stop for p in placed) - begin) / column)
    lines = [["." + " " * (cells - 1)] * columns for _ in range(rows)]
    for p in placed:
        first, last = round((p.start - begin) / column), round((p.stop - begin) / column)
        for at in range(first, last):
            lines[p.row][at] = (_name(p, several) if at == first else "-" * (cells - 1)).ljust(cells)
    wide = len(f"rank {rows - 1}")
    return "\n".join(f"{f'rank {row}':{wide}}  {''.join(line)}".rstrip() for row, line in enumerate(lines))


def _name(p: Placed, several: bool) -> str:
    return f"{p.action.kind}{p.action.micro}" + (f"/{p.action.stage}" if several else "")


def several_stages(placed: Sequence[Placed]) -> bool:
    """Whether some row owns more than one stage."""
    return len({(p.row, p.action.stage) for p in placed}) > len({p.row for p in placed})

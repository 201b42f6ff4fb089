"""A grid of rows and columns, each a ring (Mikami et al., 2018): fewer bytes go far than in one long ring, and rounds
grow with the sides of the grid. A prime number of ranks is one row, and so a ring.
"""

from unisono.programs.collectives import ROOTED, Program, completed, placed, ring
from unisono.programs.collectives.levels import InwardLevel, gather, levelled, reduce_scatter


def program(op: str, size: int, root: int = 0, pieces: int = 1, rows: int = 0) -> Program:
    """An operation of `size` ranks. rows: of the grid; 0: as near to a square as there is. Raises ValueError where they
    do not divide the ranks."""
    rows = rows or nearest(size)
    if size % rows:
        raise ValueError(f"{size} ranks are no grid of {rows} rows")
    grid = [list(range(y * (size // rows), (y + 1) * (size // rows))) for y in range(rows)]
    level = InwardLevel(ring.reduce_scatter, ring.gather, ring.all_to_all)
    inward = levelled(grid, level, level)
    inward["reduce"] = lambda _: reduce_scatter(grid, level, level) + gather(grid, level, level)
    return placed(op, size, completed(op, size, inward), root, place(grid, root) if op in ROOTED else None)


def nearest(size: int) -> int:
    """Rows of the grid that is nearest to a square, with no more rows than columns."""
    return next(rows for rows in range(int(size**0.5), 0, -1) if size % rows == 0)


def place(grid: list[list[int]], root: int) -> list[int]:
    """The rank that stands for each one where the root is the first: rows and columns are turned, and stay."""
    width = len(grid[0])
    down, right = divmod(root, width)
    return [grid[(y + down) % len(grid)][(x + right) % width] for y in range(len(grid)) for x in range(width)]

"""`tp=2x2`: ranks of `tp` in rows and columns. No torch."""

import re
from typing import Self

_GRID = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})")


class Grid(int):
    """How many ranks `tp` has, and that they stand in rows and columns: `Grid(2, 3)` counts 6 and is written `2x3`. It
    equals no plain number, which says that they stand in one row."""

    rows: int
    columns: int

    def __new__(cls, rows: int, columns: int) -> Self:
        grid = super().__new__(cls, rows * columns)
        grid.rows, grid.columns = rows, columns
        return grid

    def __getnewargs__(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.rows, self.columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and (self.rows, self.columns) == (other.rows, other.columns)

    def __hash__(self) -> int:
        return hash((self.rows, self.columns))

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    __repr__ = __str__


def columns_of(tp: int) -> int:
    """Over how many ranks of `tp` heads and widths are dealt."""
    return tp.columns if isinstance(tp, Grid) else tp


def grid_of(text: str) -> Grid | None:
    """The grid that a text writes; None where it writes none."""
    match = _GRID.fullmatch(text)
    return Grid(int(match[1]), int(match[2])) if match else None

"""The board as rich draws it. Loaded when a terminal is drawn on, not before: rich takes a tenth of a second."""

import socket

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.launch.board import Board, sparkline
from unisono.spec.words import count, instrument, mebibytes, seconds

AWAITED_NOTE = "<- others wait"
MOST_ROWS = 32
"""Ranks drawn one by one; of larger worlds the first ones, and those that others wait for."""


def live(console: Console) -> Live:
    """A region at the foot of the terminal that is redrawn when asked, and stays when closed."""
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def draw(board: Board, title: str) -> RenderableType:
    """Progress, loss and the ranks."""
    return Group(_head(board, title), _loss(board), _ranks(board))


def _head(board: Board, title: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    left = board.seconds_left()
    grid.add_row(
        Text(title or "train", style="bold"),
        ProgressBar(total=max(1, board.steps), completed=board.step, width=26),
        f"{board.step}/{board.steps}",
        f"{count(board.per_second)} {board.unit}/s" if board.per_second else "",
        f"{seconds(left)} left" if left is not None and board.step < board.steps else "",
    )
    return grid


def _loss(board: Board) -> Text:
    if board.loss is None:
        return Text("")
    text = Text(f"loss  {board.losses[0]:.3f} ")
    text.append(sparkline(board.losses), style="cyan")
    text.append(f" {board.loss:.3f}", style="bold")
    if board.val_loss is not None:
        text.append(f"   validation {board.val_loss:.3f}")
    for key, value in board.instruments.items():
        text.append(f"   {instrument(key, value)}")
    if board.doing:
        text.append(f"   {board.doing} ...")
    if board.saved:
        text.append(f"   saved {board.saved}", style="dim")
    return text


def _ranks(board: Board) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("rank", "host", "stage", "step", "step ms", "compute", "comm", "waiting", "mem", "note"):
        # Numbers are never cut: what has to give way in 80 columns is the host's name.
        table.add_column(
            name,
            justify="left" if name in ("host", "note") else "right",
            no_wrap=True,
            min_width=4 if name == "host" else None,
            max_width=12 if name == "host" else None,
        )
    host = socket.gethostname()
    awaited = board.awaited()
    for rank in sorted(board.rows):
        if rank >= MOST_ROWS and rank != awaited:
            continue
        row = board.rows[rank]
        note = AWAITED_NOTE if rank == awaited else row.note
        has_stepped = bool(row.step)
        table.add_row(
            str(rank),
            row.host or host,
            "" if row.stage is None else str(row.stage),
            str(row.step) if has_stepped else "",
            f"{row.ms:.0f}" if has_stepped else "",
            f"{row.compute:.0%}" if has_stepped else "",
            f"{row.comm:.0%}" if has_stepped else "",
            f"{row.waiting:.0%}" if has_stepped else "",
            mebibytes(row.mem_mib) if has_stepped else "",
            note,
            style="yellow" if rank == awaited else None,
        )
    if len(board.rows) > MOST_ROWS:
        table.add_row("...", "", "", "", "", "", "", "", "", f"{len(board.rows) - MOST_ROWS} more ranks")
    return table

"""Which documents lie together in a window, by their lengths alone. No torch.

A document of n tokens has n - 1 targets: each token but the first. One that is longer than a window is cut into pieces.
A piece of whose targets none counts is left out. Windows are filled best fit decreasing (Johnson, 1974): the longest
piece first, into the window where it leaves the least room.
"""

from dataclasses import dataclass

import numpy as np

from unisono.train.data.order import sample_ids


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of a line of tokens. first: of the inputs, int64 [n]; targets are one further. size: int64 [n].
    counted: targets of each that count, int64 [n]."""

    first: np.ndarray
    size: np.ndarray
    counted: np.ndarray


def pieces_of(
    starts: np.ndarray, ends: np.ndarray, window: int, marks: np.ndarray | None
) -> tuple[Pieces, int]:
    """(the pieces of documents [start, end) that have a target that counts, how many have none)."""
    targets = np.maximum(ends - starts - 1, 0)
    each = -(-targets // window)
    owner = np.repeat(np.arange(len(starts)), each)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)
    first = starts[owner] + within * window
    size = np.minimum(targets[owner] - within * window, window)
    if marks is None:
        return Pieces(first, size, size), 0
    counted = np.array(
        [
            int(np.count_nonzero(marks[a + 1 : a + 1 + n]))
            for a, n in zip(first.tolist(), size.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    filled = counted > 0
    return Pieces(first[filled], size[filled], counted[filled]), int(len(filled) - np.count_nonzero(filled))


def packed(sizes: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces in the order of their windows, where each window begins among them and the last ends)."""
    # Equal sizes are mixed, so that neighbours in a file do not meet in a window; the same way each time.
    mixed = sample_ids(0, 0, len(sizes), len(sizes)) if len(sizes) else np.zeros(0, np.int64)
    order = mixed[np.argsort(-sizes[mixed], kind="stable")]
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(window + 1)]  # windows by the room that they have left
    rooms = 0  # bit r: some window has room r
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = window, len(windows)
            windows.append([])
        windows[chosen].append(piece)
        if left := room - size:
            with_room[left].append(chosen)
            rooms |= 1 << left
    flat = np.array([piece for pieces in windows for piece in pieces], dtype=np.int64)
    return flat, np.cumsum([0, *map(len, windows)])


def filled(
    ends: np.ndarray, marks: np.ndarray | None, window: int, several: bool, documents: range
) -> tuple[Pieces, np.ndarray, np.ndarray, np.ndarray, int]:
    """(pieces, the two of `packed`, targets of each window that count, pieces that were left out) of some of the
    documents. ends: int64, behind each document. several: whether a window may hold more than one."""
    starts = np.concatenate((np.zeros(1, np.int64), ends))
    span = slice(documents.start, documents.stop)
    pieces, left_out = pieces_of(starts[:-1][span], ends[span], window, marks)
    count = len(pieces.size)
    order, begins = packed(pieces.size, window) if several else (np.arange(count), np.arange(count + 1))
    sums = np.add.reduceat(pieces.counted[order], begins[:-1]) if count else pieces.counted
    return pieces, order, begins, sums, left_out

"""Where two checkpoints differ, bit by bit: whole tensors under their logical names, whatever plan saved either."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono.spec.words import whole
from unisono.train.state.checkpoint.find import list_steps
from unisono.train.state.checkpoint.manifest import TensorEntry
from unisono.train.state.checkpoint.read import MODEL, read_full, whole_manifest
from unisono.train.state.checkpoint.tensorfile import DTYPES, as_bytes

STATES = {"weights": MODEL, "optimiser state": "optim/"}
AT_ONCE = 256 << 20
"""Bytes of tensors that are read at once, of each of the two checkpoints; a larger tensor is read alone."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor in which two checkpoints differ. elements: how many do, of `size`; None where the two cannot be laid on
    each other. largest: the greatest distance of two elements; None where that is no number. why: `shape`, `dtype`,
    `absent`, or "" where only values differ."""

    name: str
    elements: int | None = None
    size: int | None = None
    largest: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class StateDifference:
    """How two checkpoints differ. tensors: compared. differing: how many of them differ, the first of which is `first`,
    in the order of names in which `blocks.2` comes before `blocks.10`."""

    tensors: int
    differing: int
    first: TensorDifference | None


def compare(a: Path, b: Path, prefix: str = MODEL) -> StateDifference:
    """Compare all tensors whose logical name begins with `prefix`: weights, or `optim/`. Raises UsageError K01 where a
    checkpoint is damaged, or gone."""
    ours, theirs = (
        {name: entry for name, entry in whole_manifest(folder).tensors.items() if name.startswith(prefix)}
        for folder in (a, b)
    )
    names = sorted({*ours, *theirs}, key=_natural)
    odd = {name: difference for name in names if (difference := _shapes(name, ours, theirs))}
    differences = dict(odd)
    for chunk in _chunks((name for name in names if name not in odd), ours):
        both = read_full(a, chunk), read_full(b, chunk)
        for name in chunk:
            if (difference := _values(name, both[0][name], both[1][name])) is not None:
                differences[name] = difference
    first = next((differences[name] for name in names if name in differences), None)
    return StateDifference(len(names), len(differences), first)


def compare_runs(a: Path, b: Path, step_beside: Callable[[int], int | None]) -> dict[str, Any]:
    """Compare the checkpoints of two run folders up to the first that differs: the weights, and where these are equal
    the optimiser's state. step_beside: the step of `b` beside a step of `a`.

    Returns `compared` (steps of `a`, in order), `first` (`step`, `what`: weights or optimiser state, `tensors`,
    `differing`, `tensor`, as `TensorDifference`), None where all are equal, and `unread` (why some could not be read).
    """
    ours, theirs = list_steps(a), list_steps(b)
    compared, unread = list[int](), list[str]()
    for step in sorted(ours):
        other = theirs.get(step_beside(step) or -1)
        if other is None:
            continue
        try:
            states = {what: compare(ours[step], other, prefix) for what, prefix in STATES.items()}
        except UsageError as error:  # damaged, or of a run that goes on and has removed it
            unread.append(error.what)
            continue
        compared.append(step)
        for what, state in states.items():
            if state.first is not None:
                counts = {"tensors": state.tensors, "differing": state.differing}
                first = {"step": step, "what": what, **counts, "tensor": asdict(state.first)}
                return {"compared": compared, "first": first, "unread": unread}
    return {"compared": compared, "first": None, "unread": unread}


def _shapes(
    name: str, ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry]
) -> TensorDifference | None:
    """Of tensors that cannot be compared element by element."""
    mine, other = ours.get(name), theirs.get(name)
    if mine is None or other is None:
        return TensorDifference(name, why="absent")
    why = next((key for key in ("shape", "dtype") if getattr(mine, key) != getattr(other, key)), "")
    return TensorDifference(name, why=why) if why else None


def _values(name: str, ours: Tensor, theirs: Tensor) -> TensorDifference | None:
    """Of two tensors of one shape and dtype; None where they have the same bits."""
    if as_bytes(ours) == as_bytes(theirs):
        return None
    bits = [x.reshape(-1, 1).view(torch.uint8) for x in (ours.contiguous(), theirs.contiguous())]
    elements = int((bits[0] != bits[1]).any(dim=1).sum())
    wide = torch.complex128 if ours.is_complex() else torch.float64
    largest = float((ours.to(wide) - theirs.to(wide)).abs().max())  # nan, if one of them is
    return TensorDifference(name, elements, ours.numel(), largest if largest < float("inf") else None)


def _chunks(names: Iterable[str], entries: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    """Names in order, as many at once as fit into `AT_ONCE` bytes."""
    chunk: list[str] = []
    room = AT_ONCE
    for name in names:
        nbytes = prod(entries[name].shape) * DTYPES[entries[name].dtype].itemsize
        if chunk and nbytes > room:
            yield chunk
            chunk, room = [], AT_ONCE
        chunk.append(name)
        room -= nbytes
    if chunk:
        yield chunk


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts names with numbers by the numbers."""
    parts = ((whole(part), part) for part in re.split(r"(\d+)", name))
    return [(-1, part) if number is None else (number, "") for number, part in parts]

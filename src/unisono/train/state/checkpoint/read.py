"""Reading a checkpoint into whatever layout the reader has: DCP's planner says which part of which block goes where."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.train.state.checkpoint.boxes import Box, tiling_fault
from unisono.train.state.checkpoint.faults import damaged, misfit
from unisono.train.state.checkpoint.find import manifest_of
from unisono.train.state.checkpoint.manifest import Manifest, StoredBox, TensorEntry
from unisono.train.state.checkpoint.tensorfile import DTYPES, NAMES, Damage, TensorFile

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

MODEL = "model/"
"""What the logical names of parameters begin with."""
AVERAGE = "ema/"
"""What those of their averages over updates begin with, where a run keeps some."""


@dataclass(frozen=True)
class _Read:
    """One part of one block that goes into one piece."""

    block: StoredBox
    dtype: torch.dtype
    piece: Box
    item: "ReadItem"


def load(folder: Path, pieces: Sequence[Box]) -> dict[str, Any]:
    """Fill each `piece.tensor` in place from the checkpoint in `folder` and return the saved state.

    The layout is free: each piece is put together from the blocks that overlap it. Only those blocks are read, each
    once, and each is verified before a value of it is used. `load(folder, [])` reads the state alone.

    Raises UsageError: K01 if anything read is damaged (some pieces may be filled by then: load them again, from
    elsewhere), K03 if a piece's tensor is not in the checkpoint, or not with this shape and dtype.
    """
    try:
        manifest = manifest_of(folder)
        _check_fit(folder, manifest, pieces)
        _fill(folder, manifest, _plan(manifest, pieces))
    except Damage as damage:
        raise damaged(folder, damage) from damage
    return manifest.state


def read_full(folder: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors by logical name, put together on the CPU of this one process: for export and verification.

    `names` chooses some; all by default. Raises UsageError as `load` does.
    """
    manifest = whole_manifest(folder)
    chosen = list(manifest.tensors) if names is None else list(names)
    if unknown := [name for name in chosen if name not in manifest.tensors]:
        raise misfit(folder, f"it has no tensor {unknown[0]!r}", len(unknown))
    try:
        full = {name: _empty(name, manifest.tensors[name]) for name in chosen}
    except Damage as damage:
        raise damaged(folder, damage) from damage
    load(folder, [Box(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in full.items()])
    return full


def _check_whole(name: str, entry: TensorEntry) -> None:
    if fault := tiling_fault(entry.shape, entry.extents()):
        raise Damage(fault, tensor=name)


def _empty(name: str, entry: TensorEntry) -> torch.Tensor:
    _check_whole(name, entry)  # first: a shape without blocks to fill it may be any lie
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])


def tensor_names(folder: Path) -> list[str]:
    """Logical names of all tensors in the checkpoint, sorted. Raises UsageError K01."""
    return sorted(whole_manifest(folder).tensors)


def whole_manifest(folder: Path) -> Manifest:
    """What the checkpoint holds. Raises UsageError K01."""
    try:
        return manifest_of(folder)
    except Damage as damage:
        raise damaged(folder, damage) from damage


def parameters_of(folder: Path, kind: str = MODEL) -> dict[str, TensorEntry]:
    """The tensors of parameters, or their averages, by their names in the model. Raises UsageError K01."""
    tensors = whole_manifest(folder).tensors
    return {name.removeprefix(kind): tensors[name] for name in tensors if name.startswith(kind)}


def _check_fit(folder: Path, manifest: Manifest, pieces: Sequence[Box]) -> None:
    problems: list[str] = []
    for piece in pieces:
        entry = manifest.tensors.get(piece.name)
        dtype = NAMES.get(piece.tensor.dtype, str(piece.tensor.dtype))
        if entry is None:
            problems.append(f"it has no tensor {piece.name!r}")
        elif entry.shape != tuple(piece.full_shape):
            problems.append(f"{piece.name!r} is {list(entry.shape)} there and {list(piece.full_shape)} here")
        elif entry.dtype != dtype:
            problems.append(f"{piece.name!r} is {entry.dtype} there and {dtype} here")
    if problems:
        raise misfit(folder, problems[0], len(problems))


def _plan(manifest: Manifest, pieces: Sequence[Box]) -> dict[str, dict[str, list[_Read]]]:
    """file -> key -> what to copy out of that block. Raises Damage if the blocks do not tile a tensor."""
    wanted: dict[str, list[Box]] = defaultdict(list)
    for piece in pieces:
        if piece.tensor.numel():
            wanted[piece.name].append(piece)
    reads: dict[str, dict[str, list[_Read]]] = defaultdict(lambda: defaultdict(list))
    for name, mine in wanted.items():
        entry = manifest.tensors[name]
        _check_whole(name, entry)
        for item in _overlaps(name, entry, mine):
            if item.storage_index.index is None or item.dest_index.index is None:
                raise RuntimeError("DCP's planner gave a read item without indices")
            block = entry.blocks[item.storage_index.index]
            read = _Read(block, DTYPES[entry.dtype], mine[item.dest_index.index], item)
            reads[block.file][block.key].append(read)
    return reads


def _overlaps(name: str, entry: TensorEntry, pieces: Sequence[Box]) -> "list[ReadItem]":
    """Every (block, piece) pair that shares elements, and where these lie in both, as DCP's planner finds them."""
    # Late: it draws in DTensor and sympy (0.75 s), and a run that starts from nothing never needs it.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    stored = [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.shape)) for b in entry.blocks]
    wanted = [ChunkStorageMetadata(torch.Size(p.start), p.tensor.shape) for p in pieces]
    whole = TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), stored)
    return create_read_items_for_chunk_list(name, whole, wanted)


def _fill(folder: Path, manifest: Manifest, plan: dict[str, dict[str, list[_Read]]]) -> None:
    scratch = torch.empty(0, dtype=torch.uint8)  # one for all blocks: each new one would be paged in anew
    for file, blocks in sorted(plan.items()):
        with TensorFile(folder / file, manifest.files[file]) as opened:
            # Only now: until the file's length is verified, a block's length is hearsay.
            need = max(reads[0].block.bytes for reads in blocks.values())
            if need > scratch.numel():
                scratch = torch.empty(need, dtype=torch.uint8)
            for key, reads in blocks.items():
                first = reads[0]
                stored = opened.read(key, first.dtype, first.block.shape, first.block.crc32, scratch)
                for read in reads:
                    _copy(stored, read)


def _copy(stored: torch.Tensor, read: _Read) -> None:
    target = read.piece.tensor.detach()
    item = read.item
    parts = zip(item.storage_offsets, item.dest_offsets, item.lengths, strict=True)
    for dim, (source_at, target_at, length) in enumerate(parts):
        stored = stored.narrow(dim, source_at, length)
        target = target.narrow(dim, target_at, length)
    target.copy_(stored)

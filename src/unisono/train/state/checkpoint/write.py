"""Writing a checkpoint: each rank its own file, then rank 0 makes all of it visible by one rename.

The order of events, on which safety rests (a crash between any two leaves the checkpoint before it in force):

1. every rank writes `step-000200.tmp-<attempt>/rank-00001.safetensors`, fsyncs it, then its marker, by rename;
2. rank 0 has seen all markers, writes `manifest.json`, fsyncs file and folder;
3. rank 0 renames the folder to `step-000200` (an older one of that name is moved aside first, and stands in for it
   until this rename), fsyncs `checkpoints/`;
4. rank 0 moves `latest`;
5. only now is anything older removed.

What is written is looked at once more before it gets its name: the manifest and the head of each file are read back.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from unisono.observe.files import sync_folder, write_whole
from unisono.spec.doubtful import read_regular
from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.faults import bad_cut, not_written
from unisono.train.state.checkpoint.find import FOLDER, LATEST, best_step, list_steps, step_name
from unisono.train.state.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Marker,
    StoredBox,
    TensorEntry,
    block_key,
    decode_marker,
    encode,
    encode_marker,
    merge,
    rank_file,
    read_manifest,
)
from unisono.train.state.checkpoint.tensorfile import NAMES, Damage, TensorFile, write_tensors
from unisono.train.state.checkpoint.vote import PeerFailed, Vote, polls, raise_failures


def save(
    run_dir: Path,
    step: int,
    pieces: Sequence[Box],
    state: dict[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
    token: str = "",
    keep: int | None = None,
    keep_every: int = 0,
    patience: float = 600.0,
    wait: bool = True,
    given_up: Callable[[], bool] = lambda: False,
) -> Path:
    """Write this rank's part of `run_dir/checkpoints/step-…` and return that folder; called by every rank.

    `pieces`: all that lie on this rank; those with `saved=False` or without elements are only compared with what the
    other ranks write. `state`: JSON values, rank 0's is stored. `token`: a text that all ranks of this attempt
    share and no other attempt has ever had (only its hash is seen on disk); may be empty if `world` is 1.
    `keep`: afterwards remove all but the newest `keep` checkpoints, and those of each `keep_every`-th step.
    `patience`: seconds without any progress after which the others are given up. `wait=False`: ranks other than 0
    return without knowing how the others fared. `given_up()`: whether the others have failed, who is not heard here.

    Raises UsageError K02 if any rank could not write, on all ranks; the folder is then not visible and no older
    checkpoint has changed. K04 if the ranks' pieces do not tile every tensor. ValueError if `state` is not JSON, the
    token is missing, or a piece's dtype cannot be stored.
    """
    _check(state, world, token, keep)
    attempt = hashlib.blake2b((token or os.urandom(16).hex()).encode(), digest_size=6).hexdigest()
    checkpoints, final = run_dir / FOLDER, run_dir / FOLDER / step_name(step)
    vote = Vote(checkpoints / f"{final.name}.tmp-{attempt}", rank)
    try:
        vote.announce()
        if rank == 0:
            _clean(checkpoints, vote.folder)
        _write_rank(vote.folder, pieces, attempt, rank, world)
        if rank == 0:
            manifest = _gather(vote.folder, step, attempt, world, state, patience, given_up)
            _commit(run_dir, vote, final, manifest)
            prune(run_dir, step, keep, keep_every)
        elif wait:
            _await_commit(vote.folder, final, attempt, patience, given_up)
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        number = error.errno if isinstance(error, OSError) else getattr(error, "number", None)
        rank_of = getattr(error, "rank", None)  # all ranks tell the same story, whoever is heard first
        culprit = rank if rank_of is None else rank_of
        for folder in (vote.folder, final):
            vote.fail(reason, number, culprit, folder)
        with contextlib.suppress(OSError):  # give the space back; the name stays hidden anyway
            for half in vote.folder.glob(rank_file(rank) if rank else "rank-*.safetensors"):
                half.unlink(missing_ok=True)
        if isinstance(error, OSError | PeerFailed):
            raise not_written(checkpoints, step, reason, number, culprit) from error
        raise
    return final


def _check(state: dict[str, Any], world: int, token: str, keep: int | None) -> None:
    """Raises ValueError where a save cannot be meant so."""
    if world > 1 and not token:
        raise ValueError("a save by several ranks needs a token that they share")
    if keep is not None and keep < 1:
        raise ValueError("keep must be at least 1: the newest checkpoint is never removed")
    try:
        json.dumps(state, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"the state of a checkpoint must be JSON values: {error}") from error


def _write_rank(folder: Path, pieces: Sequence[Box], attempt: str, rank: int, world: int) -> None:
    """Write this rank's tensors and then its marker. A rank that saves nothing writes only the marker."""
    tensors: dict[str, TensorEntry] = {}
    mine: dict[str, Box] = {}
    for piece in pieces:
        if piece.tensor.dtype not in NAMES:
            raise ValueError(f"{piece.name!r}: a checkpoint cannot hold {piece.tensor.dtype}")
        entry = TensorEntry(NAMES[piece.tensor.dtype], tuple(int(n) for n in piece.full_shape), ())
        if tensors.setdefault(piece.name, entry) != entry:
            raise ValueError(f"{piece.name!r} is given with two shapes or dtypes")
        if piece.saved and piece.tensor.numel():
            key = block_key(piece.name, piece.start)
            if key in mine:
                raise ValueError(f"{piece.name!r}: the box at {list(piece.start)} is given twice")
            mine[key] = piece
    file_entry = None
    if mine:
        file = rank_file(rank)
        need = bytes_of(mine.values())
        if (free := free_bytes(folder)) < need:
            raise OSError(errno.ENOSPC, no_room(need, free))
        try:
            written = write_tensors(folder / file, [(key, piece.tensor) for key, piece in mine.items()])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(errno.ENOSPC, no_room(need, _had(folder / file))) from error
        file_entry = written.file
        for key, piece in mine.items():
            start, shape = tuple(int(n) for n in piece.start), tuple(piece.tensor.shape)
            size = prod(shape) * piece.tensor.element_size()
            known = tensors[piece.name]
            block = StoredBox(file, key, start, shape, written.crc32[key], size)
            tensors[piece.name] = TensorEntry(known.dtype, known.shape, (*known.blocks, block))
    marker = Marker(attempt, rank, world, file_entry, tensors)
    write_whole(folder / f"rank-{rank:05d}.json", encode_marker(marker))


def _gather(
    folder: Path,
    step: int,
    attempt: str,
    world: int,
    state: dict[str, Any],
    patience: float,
    given_up: Callable[[], bool],
) -> Manifest:
    """Wait until every rank's marker is there, and make one manifest of them."""
    markers: dict[int, Marker] = {}
    missing = set(range(world))
    for _ in polls((folder,), patience, "some ranks", given_up):
        for rank in sorted(missing):
            path = folder / f"rank-{rank:05d}.json"
            if path.exists():
                marker = decode_marker(path.read_bytes())
                if (marker.attempt, marker.rank, marker.world) != (attempt, rank, world):
                    raise bad_cut(step, f"rank {rank} takes part in another save ({marker.world} ranks)")
                markers[rank] = marker
        missing -= markers.keys()
        if not missing:
            break
        raise_failures(folder)
    try:
        return merge([markers[rank] for rank in range(world)], step, attempt, state)
    except ValueError as error:
        raise bad_cut(step, str(error)) from error


def _commit(run_dir: Path, vote: Vote, final: Path, manifest: Manifest) -> None:
    """Make the checkpoint visible. Killed anywhere in here, the one before it is still in force, or this one is."""
    text = encode(manifest)
    write_whole(vote.folder / MANIFEST, text)  # fsyncs the folder too, with all ranks' files in it
    _look_again(vote.folder, manifest, text)
    for path in vote.folder.glob("rank-*.json"):
        os.unlink(path)
    for path in vote.folder.glob("rank-*.writing"):
        if path.name != f"rank-{vote.rank:05d}.writing":
            os.unlink(path)
    aside = final.with_name(f"{final.name}.old-{manifest.attempt}")
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(vote.folder, final)
    except OSError:
        with contextlib.suppress(OSError):
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    write_whole(run_dir / LATEST, f"{FOLDER}/{final.name}\n".encode())
    vote.withdraw(final)
    shutil.rmtree(aside, ignore_errors=True)


def _await_commit(
    folder: Path, final: Path, attempt: str, patience: float, given_up: Callable[[], bool]
) -> None:
    """What a rank other than 0 does until rank 0 has made the checkpoint visible, or someone has failed."""
    committed = False
    for _ in polls((folder, folder.parent), patience, "rank 0", given_up):
        if folder.exists():
            raise_failures(folder)
            continue
        if not committed:
            try:
                committed = read_manifest(final).attempt == attempt
            except Damage:
                committed = False
            if not committed:
                raise PeerFailed("the save was given up")
        raise_failures(final)
        if not (final / "rank-00000.writing").exists():
            return


def _clean(checkpoints: Path, current: Path) -> None:
    """Remove what dead saves left, and give a checkpoint that was moved aside its name back."""
    for path in checkpoints.glob("step-*.tmp-*"):
        if path != current:
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints.glob("step-*.old-*"):
        plain = path.with_name(path.name.partition(".")[0])
        if plain.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, plain)


def _look_again(folder: Path, manifest: Manifest, text: bytes) -> None:
    """Raises OSError unless manifest and heads are there as they were written: older checkpoints make room for this."""
    try:
        if read_regular(folder / MANIFEST, len(text)) != text:
            raise Damage("has other bytes", file=MANIFEST)
        for file, entry in manifest.files.items():
            with TensorFile(folder / file, entry):
                pass
    except Damage as damage:
        raise OSError(errno.EIO, f"what was written does not read back: {damage}") from damage


def discard(run_dir: Path, step: int) -> None:
    """Remove what saves of this step left that failed. Not while a rank writes one."""
    for half in (run_dir / FOLDER).glob(f"{step_name(step)}.tmp-*"):
        shutil.rmtree(half, ignore_errors=True)


def bytes_of(pieces: Iterable[Box]) -> int:
    """The bytes of the tensors that will be written."""
    return sum(p.tensor.numel() * p.tensor.element_size() for p in pieces if p.saved)


def free_bytes(folder: Path) -> int:
    """What the disk of `folder` has left for this user; it need not exist. Raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def no_room(need: int, free: int) -> str:
    """The system's words with both numbers."""
    return f"{os.strerror(errno.ENOSPC)}: needs {_size(need)}, has {_size(free)}"


def _had(file: Path) -> int:
    """What the disk had before this file was begun."""
    with contextlib.suppress(OSError):
        return free_bytes(file.parent) + file.stat().st_blocks * 512
    return 0


def _size(count: int) -> str:
    unit = max(i for i in range(4) if i == 0 or count >= 1024**i)
    return f"{count} bytes" if not unit else f"{count / 1024**unit:.1f} {('', 'KiB', 'MiB', 'GiB')[unit]}"


def prune(run_dir: Path, step: int, keep: int | None, keep_every: int = 0) -> None:
    """Remove all but `keep` checkpoints: the one just saved, older ones, then those of an abandoned future. Those of
    each `keep_every`-th step, and the best one, stay for ever, and count for nothing."""
    if keep is None:
        return
    steps: dict[int, Path] = {}
    with contextlib.suppress(OSError):  # the save is good: what cannot be listed now goes another time
        steps = list_steps(run_dir)
    for old in doomed(steps, step, keep, keep_every, best_step(run_dir)):
        away = steps[old].with_name(f"{step_name(old)}.tmp-removed")
        # Renamed first: a removal that dies half way must not leave what looks like a damaged checkpoint.
        with contextlib.suppress(OSError):
            os.rename(steps[old], away)
            shutil.rmtree(away, ignore_errors=True)


def doomed(
    steps: Iterable[int], newest: int, keep: int, keep_every: int = 0, best: int | None = None
) -> list[int]:
    """Which of these steps go, where `newest` was just saved and is whole, and `best` stays."""
    passing = [s for s in steps if s != best and (s == newest or not keep_every or s % keep_every)]
    return sorted(passing, key=lambda s: (s > newest, -s))[keep:]

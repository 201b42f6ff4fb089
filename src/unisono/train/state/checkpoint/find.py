"""Which checkpoints a run has, and which of them can be trusted."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from unisono.observe.files import write_whole
from unisono.spec.doubtful import read_regular
from unisono.spec.runs import BEST, CHECKPOINTS
from unisono.train.state.checkpoint.boxes import tiling_fault
from unisono.train.state.checkpoint.manifest import MANIFEST, Manifest, StoredBox, read_manifest
from unisono.train.state.checkpoint.tensorfile import DTYPES, Damage, FileEntry, TensorFile

FOLDER = CHECKPOINTS
LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})(\.old-[0-9a-f]+)?")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, None if it is not such a name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_steps(run_dir: Path) -> dict[int, Path]:
    """step -> folder of every checkpoint of the run, whole or not.

    `step-000200.old-…` stands in for `step-000200` where a re-save died between its two renames.
    """
    by_step: dict[int, Path] = {}
    folders = run_dir / FOLDER
    for path in sorted(folders.iterdir()) if folders.is_dir() else ():
        step = step_of(path)
        if step is not None and path.is_dir():
            by_step.setdefault(step, path)  # the plain name sorts before its stand-in
    return by_step


def latest(run_dir: Path) -> Path | None:
    """The checkpoint that `latest` names: the last one saved. None before the first save."""
    step = pointed(run_dir)
    return None if step is None else list_steps(run_dir).get(step)


def best(run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoints/best` names: of the best validation (`[early_stopping]`). None without one."""
    step = best_step(run_dir)
    return None if step is None else list_steps(run_dir).get(step)


def best_step(run_dir: Path) -> int | None:
    """The step that `checkpoints/best` names; None where nothing does."""
    return _named(run_dir / FOLDER / BEST)


def point_best(run_dir: Path, step: int) -> None:
    """Let `checkpoints/best` name this step; nothing where it has no checkpoint, as that of a step that a run left when
    it was put back. Raises OSError."""
    pointer = run_dir / FOLDER / BEST
    if step in list_steps(run_dir):
        write_whole(pointer, f"{FOLDER}/{step_name(step)}\n")
    else:
        pointer.unlink(missing_ok=True)


def pointed(run_dir: Path) -> int | None:
    """The step that was saved last, whether it is there or not; None before the first save."""
    return _named(run_dir / LATEST)


def _named(pointer: Path) -> int | None:
    """The step of the checkpoint that a file of one line names."""
    try:
        name = read_regular(pointer, 4096) or b""
    except OSError:
        return None
    return step_of(Path(name.decode(errors="replace").strip()))


def by_age(run_dir: Path) -> list[Path]:
    """Checkpoints in the order in which to resume from them.

    The one that `latest` names, then falling steps. Steps above it come last: they belong to a future that the run
    left when it was resumed from an earlier step, or to a save that died before it moved `latest`.
    """
    steps = list_steps(run_dir)
    pointed = latest(run_dir)
    top = step_of(pointed) if pointed is not None else None
    return [steps[step] for step in sorted(steps, key=partial(resumed_first, top))]


def resumed_first(top: int | None, step: int) -> tuple[bool, int]:
    """Sorts steps in the order in which to resume from them. top: the one that was saved last."""
    return top is not None and step > top, -step


def first_whole(folders: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The first checkpoint whose every byte verifies, None if there is none; what is wrong with those before it."""
    faults: list[str] = []
    for folder in folders:
        problems = verify_folder(folder)
        if not problems:
            return folder, faults
        faults.append(f"checkpoint {folder.name} is damaged: {problems[0]}")
    return None, faults


def newest_whole(run_dir: Path, below: int | None = None) -> Path | None:
    """The newest whole checkpoint, None if there is none; only steps `< below` if given."""
    return first_whole(f for f in by_age(run_dir) if below is None or (step_of(f) or 0) < below)[0]


def manifest_of(folder: Path) -> Manifest:
    """What the checkpoint holds. Raises Damage, also where the folder is named after another step."""
    manifest, step = read_manifest(folder), step_of(folder)
    if step is not None and manifest.step != step:
        raise Damage(f"is of step {manifest.step}", file=MANIFEST)
    return manifest


def verify_folder(folder: Path) -> list[str]:
    """Every problem of a checkpoint, each naming file and tensor; an empty list means that it is whole."""
    try:
        manifest = manifest_of(folder)
    except Damage as damage:
        return [str(damage)]
    problems = [
        str(Damage(fault, tensor=name))
        for name, entry in manifest.tensors.items()
        if (fault := tiling_fault(entry.shape, entry.extents()))
    ]
    blocks: dict[str, list[tuple[StoredBox, torch.dtype]]] = {file: [] for file in manifest.files}
    for entry in manifest.tensors.values():
        for block in entry.blocks:
            blocks[block.file].append((block, DTYPES[entry.dtype]))
    for file, held in blocks.items():
        problems += _verify_file(folder / file, manifest.files[file], held)
    return problems


def _verify_file(path: Path, entry: FileEntry, blocks: list[tuple[StoredBox, torch.dtype]]) -> list[str]:
    problems: list[str] = []
    try:
        with TensorFile(path, entry) as opened:
            scratch = torch.empty(max((block.bytes for block, _ in blocks), default=0), dtype=torch.uint8)
            for block, dtype in blocks:
                try:
                    opened.read(block.key, dtype, block.shape, block.crc32, scratch)
                except Damage as damage:
                    problems.append(str(damage))
    except Damage as damage:
        problems.append(str(damage))
    return problems

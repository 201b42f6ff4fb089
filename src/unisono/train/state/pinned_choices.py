"""What a run measured at its first start and does alike at the next: another sum would round otherwise."""

import json
from contextlib import suppress
from pathlib import Path

from unisono.comm.mesh import Mesh
from unisono.observe.files import write_whole
from unisono.sync import Sync

FILE = "collective.json"
SYNC = "sync.json"


def keep(folder: Path, asked: str, mesh: Mesh) -> None:
    """Write down beside the run what sums gradients, where that was measured. asked: the plan's `collective`."""
    taken = mesh.dp.algorithm.settled() if mesh.dp.algorithm is not None else ""
    _write(folder / FILE, asked, mesh.dp.size, taken)


def keep_sync(folder: Path, asked: str, sync: Sync) -> None:
    """The same of the size of buckets. asked: the plan's `sync`."""
    while isinstance(inner := getattr(sync, "inner", None), Sync):
        sync = inner
    _write(folder / SYNC, asked, sync.dp.size, sync.settled)


def _write(path: Path, asked: str, dp: int, taken: str) -> None:
    if taken:
        write_whole(path, json.dumps({"asked": asked, "dp": dp, "taken": taken}) + "\n")


def kept(folder: Path, asked: str, dp: int, file: str = FILE) -> str:
    """The `collective`, or by SYNC the `sync`, that a run goes on with: what it measured, if it asks for the same on as
    many replicas."""
    with suppress(OSError, ValueError, KeyError):
        told = json.loads((folder / file).read_text(encoding="utf-8"))
        if (told["asked"], told["dp"]) == (asked, dp):
            return str(told["taken"])
    return asked

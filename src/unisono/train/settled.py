"""What a run measured at its first start and does alike at the next: another sum would round otherwise."""

import json
from contextlib import suppress
from pathlib import Path

from unisono.comm.mesh import Mesh
from unisono.observe.files import write_whole

FILE = "collective.json"


def keep(folder: Path, asked: str, mesh: Mesh) -> None:
    """Write down beside the run what sums gradients, where that was measured. asked: the plan's `collective`."""
    taken = mesh.dp.algorithm.settled() if mesh.dp.algorithm is not None else ""
    if taken:
        told = {"asked": asked, "dp": mesh.dp.size, "taken": taken}
        write_whole(folder / FILE, json.dumps(told) + "\n")


def kept(folder: Path, asked: str, dp: int) -> str:
    """The `collective` that a run goes on with: what it measured, if it asks for the same on as many replicas."""
    with suppress(OSError, ValueError, KeyError):
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if (told["asked"], told["dp"]) == (asked, dp):
            return str(told["taken"])
    return asked

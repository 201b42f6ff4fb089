"""What a run measured at its first start, kept beside it: a resumed run does the same, since other sums round
otherwise."""

import json
from contextlib import suppress
from pathlib import Path

from unisono.comm.mesh import Mesh
from unisono.observe.files import write_whole
from unisono.plan import Plan
from unisono.sync import Sync

COLLECTIVE, SYNC = "collective.json", "sync.json"


def pin(folder: Path, plan: Plan, mesh: Mesh, sync: Sync) -> None:
    """Write down beside the run which collective sums gradients and how large buckets are, where that was measured."""
    while isinstance(inner := getattr(sync, "inner", None), Sync):
        sync = inner
    collective = mesh.dp.algorithm.settled() if mesh.dp.algorithm is not None else ""
    for file, wish, taken in (
        (COLLECTIVE, plan.collective, collective),
        (SYNC, plan.sync, sync.settled),
    ):
        if taken:
            choice = {"asked": wish, "dp": mesh.dp.size, "taken": taken}
            write_whole(folder / file, json.dumps(choice) + "\n")


def pinned(folder: Path, wish: str, dp: int, file: str) -> str:
    """The choice that a run goes on with: what it measured, if it asks for the same on as many replicas. wish: the
    plan's `collective` or `sync`, after `file`."""
    with suppress(OSError, ValueError, KeyError):
        choice = json.loads((folder / file).read_text(encoding="utf-8"))
        if (choice["asked"], choice["dp"]) == (wish, dp):
            return str(choice["taken"])
    return wish

"""What the clients of a joined process keep from task to task, so that none of it is lost with the process.

    DIR/RUN/client-3/00000007.safetensors     after its task 7

SCAFFOLD's control variate and what a codec with `+ef` has not sent must be those after the last answer that the server
has. A client cannot know which one that is: it may have been killed before it sent one, or been too late with it. So it
keeps its last versions, and the server says with each task which of its answers came last.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unisono.observe.files import replaced
from unisono_contrib.federated.client import Task

_MOST = 8
"""Versions of a client in the folder, for a server that goes on from an older checkpoint. In memory are two."""


@dataclass(slots=True)
class ClientKeeper:
    """folder: where it lies; None: in memory alone, where it is lost with this process. note(text): for people."""

    folder: Path | None
    note: Callable[[str], None]
    _versions: dict[tuple[str, int], dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    _lost: set[tuple[str, int]] = field(default_factory=set)

    def before(self, task: Task) -> dict[str, Tensor] | None:
        """What its client begins a task with: the version after the answer that the server has, a copy. None before
        its first one, and where that version is not there, which is noted once."""
        key = (task.run, task.client)
        if task.heard < 0:
            return None
        if (kept := self._versions.get(key, {}).get(task.heard)) is None:
            kept = _read(self.folder, task)
        if kept is None:
            if key not in self._lost:
                self.note(
                    f"client {task.client} has not kept what follows its task {task.heard + 1}, the last one that the"
                    " server has: it begins anew"
                )
            self._lost.add(key)
            return None
        return {name: x.clone() for name, x in kept.items()}

    def after(self, task: Task, kept: Mapping[str, Tensor]) -> None:
        """Keep what a client has after a task, before its answer is sent. Raises OSError."""
        key = (task.run, task.client)
        copies = {name: x.clone() for name, x in kept.items()}
        others = self._versions.get(key, {}).items()
        self._versions[key] = {n: x for n, x in others if n == task.heard} | {task.number: copies}
        if self.folder is None:
            return
        path = _path(self.folder, task, task.number)
        with replaced(path) as aside:
            save_file(copies, aside, {"run": task.run})
        there = sorted(path.parent.glob("*.safetensors"))
        earlier = [other for other in there if other <= path]
        later = there[len(earlier) :]  # of rounds behind which the server has gone back
        for other in [*earlier[:-_MOST], *later]:
            other.unlink(missing_ok=True)


def _read(folder: Path | None, task: Task) -> dict[str, Tensor] | None:
    if folder is None:
        return None
    try:
        return load_file(_path(folder, task, task.heard))
    except (OSError, SafetensorError):  # no such version, or one that a disk has damaged
        return None


def _path(folder: Path, task: Task, number: int) -> Path:
    """By a hash of the run, whose name comes from the server."""
    run = blake2b(task.run.encode(), digest_size=8).hexdigest()
    return folder / run / f"client-{task.client}" / f"{number:08d}.safetensors"

"""Copies of checkpoints in a second place (`train.mirror`), and the way back from there.

    URL/<name>/<id>/step-000200/rank-00000.safetensors ... manifest.json

One rank's thread copies a checkpoint when it is whole, while training goes on; the manifest goes last, and goes first
when a copy makes room, so that a copy with a manifest is a whole one. What fails is told, and costs nothing but that
copy. If checkpoints come faster than they are copied, the newest is next and those between are left out.
"""

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, final

from unisono.observe.files import sync_folder
from unisono.spec.doubtful import open_regular, plain
from unisono.train.state.checkpoint.find import (
    FOLDER,
    best_step,
    list_steps,
    step_name,
    step_of,
    verify_folder,
)
from unisono.train.state.checkpoint.manifest import MANIFEST, SIZE_LIMIT, decode
from unisono.train.state.checkpoint.saver import give_way
from unisono.train.state.checkpoint.tensorfile import Damage
from unisono.train.state.checkpoint.write import doomed, free_bytes, no_room
from unisono_contrib.comm.depot import Depot, bare, depot_at

_STALLED = 120.0  # seconds without a byte after which the end of a run waits no longer for a copy


@dataclass(frozen=True)
class MirrorFolder:
    """The copies of a run: `folder` on a depot. shown: the URL as it may be told."""

    depot: Depot
    folder: str
    shown: str

    def steps(self) -> dict[int, str]:
        """step -> folder of each copy, whole or not."""
        steps = {}
        for name in self.depot.names(self.folder):
            if (step := step_of(Path(name))) is not None and name == step_name(step):
                steps[step] = f"{self.folder}/{name}"
        return steps


def place_at(url: str, run_dir: Path) -> MirrorFolder:
    """The place of a run, by its name and id. Raises UsageError E01 or C02."""
    run = run_dir.resolve()
    return MirrorFolder(depot_at(url, "train.mirror"), f"{run.parent.name}/{run.name}", bare(url))


@final
class Mirroring:
    """Copies checkpoints of one run from one rank. keep, keep_every: which copies stay, as of the checkpoints.

    notes: what there is to tell, taken by whoever may.
    """

    def __init__(self, place: MirrorFolder, keep: int | None = None, keep_every: int = 0) -> None:
        self._place, self._keep, self._keep_every = place, keep, keep_every
        self.notes: deque[str] = deque()
        self._next: Path | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._heard = time.monotonic()

    def offer(self, folder: Path) -> None:
        """A checkpoint is whole: copy it when its turn comes. Never waits."""
        with self._lock:
            self._next = folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def close(self, most: float | None = None) -> None:
        """Wait for what is under way, while it moves; `most` seconds, if given."""
        begun = self._heard = time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(0.1)
            now = time.monotonic()
            if now - self._heard > _STALLED or (most is not None and now - begun > most):
                self.notes.append(f"{self._place.shown}: the last copy was not finished")
                return

    def _work(self) -> None:
        give_way()
        while True:
            with self._lock:
                folder, self._next = self._next, None
                if folder is None:
                    self._thread = None
                    return
            try:
                best = best_step(folder.parents[1])
                self._copy(folder)
                self._copy_best(folder, best)
                self._make_room(step_of(folder) or 0, best)
            except Exception as error:  # each store has its own
                why = plain(str(getattr(error, "strerror", None) or error) or type(error).__name__)
                what = f"checkpoint {folder.name} could not be copied to {self._place.shown}: {why}"
                self.notes.append(f"{what}; training goes on, the next is tried")

    def _copy(self, folder: Path) -> None:
        place, depot = self._place, self._place.depot
        into = f"{place.folder}/{folder.name}"
        with ExitStack() as held:  # all are open before one is read: their names may go meanwhile

            def opened(name: str) -> BinaryIO:
                return held.enter_context(os.fdopen(open_regular(folder / name), "rb"))

            text = opened(MANIFEST).read()
            files = {name: opened(name) for name in decode(text).files}
            there = depot.names(into)
            if MANIFEST in there:
                depot.drop(f"{into}/{MANIFEST}")
            for name, file in files.items():
                depot.put(file, f"{into}/{name}", self._moved)
            for name in set(there) - {*files, MANIFEST}:  # of another save of this step
                depot.drop(f"{into}/{name}")
            depot.put(BytesIO(text), f"{into}/{MANIFEST}", self._moved)

    def _copy_best(self, newest: Path, best: int | None) -> None:
        """Copy the best checkpoint too, should it have been left out."""
        if best is None or step_name(best) == newest.name or best in self._place.steps():
            return
        if (folder := list_steps(newest.parents[1]).get(best)) is not None:
            self._copy(folder)

    def _make_room(self, newest: int, best: int | None) -> None:
        if self._keep is None:
            return
        steps = self._place.steps()
        for step in doomed(steps, newest, self._keep, self._keep_every, best):
            _remove(self._place.depot, steps[step])

    def _moved(self, count: int) -> None:
        self._heard = time.monotonic()


def _remove(depot: Depot, folder: str) -> None:
    names = depot.names(folder)
    for name in sorted(names, key=lambda name: name != MANIFEST):
        depot.drop(f"{folder}/{name}")
    with suppress(Exception):  # stores without folders have none to remove
        depot.drop(folder)


def fetch(
    place: MirrorFolder, run_dir: Path, steps: Callable[[Iterable[int]], list[int]]
) -> tuple[Path | None, list[str]]:
    """The first copy that is whole, put among the run's checkpoints, or None; and what is to be told.

    steps: of those there are, which to try, in order.
    """
    notes: list[str] = []
    try:
        there = place.steps()
    except Exception as error:
        return None, [
            f"{place.shown} cannot be asked for copies: {plain(str(error) or type(error).__name__)}"
        ]
    for step in steps(there):
        try:
            folder = _fetch(place.depot, there[step], run_dir / FOLDER, step)
        except Exception as error:
            why = plain(str(getattr(error, "strerror", None) or error) or type(error).__name__)
            notes.append(f"the copy of {step_name(step)} in {place.shown} is no help: {why}")
            continue
        return folder, [*notes, f"{folder.name} was taken from its copy in {place.shown}"]
    return None, notes


def _fetch(depot: Depot, source: str, checkpoints: Path, step: int) -> Path:
    final = checkpoints / step_name(step)
    aside = final.with_name(f"{final.name}.tmp-fetched")
    if MANIFEST not in depot.names(source):
        raise Damage("is missing: it was never finished", file=MANIFEST)
    head = BytesIO()
    depot.get(f"{source}/{MANIFEST}", head, SIZE_LIMIT, lambda count: None)
    manifest = decode(head.getvalue())  # what it names lies in its folder, and is as long as it says
    need = sum(entry.bytes for entry in manifest.files.values())
    if need > (free := free_bytes(checkpoints)):
        raise OSError(0, no_room(need, free))
    _empty(aside)
    try:
        for name, entry in manifest.files.items():
            with (aside / name).open("wb") as file:
                depot.get(f"{source}/{name}", file, entry.bytes, lambda count: None)
                file.flush()
                os.fsync(file.fileno())
        (aside / MANIFEST).write_bytes(head.getvalue())
        if problems := verify_folder(aside):
            raise Damage(problems[0])
        sync_folder(aside)
        if final.exists():  # a damaged one, for which this is taken
            os.rename(final, _empty(final.with_name(f"{final.name}.tmp-damaged")) / final.name)
        os.rename(aside, final)
        sync_folder(checkpoints)
    finally:
        for half in (aside, final.with_name(f"{final.name}.tmp-damaged")):
            shutil.rmtree(half, ignore_errors=True)
    return final


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder

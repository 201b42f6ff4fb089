"""The checkpoints of a session: what cannot be written is told and tried again, and the run goes on.

Ranks agree before a save begins (is there room for all of it? which attempt is it?) and after it (is it over
everywhere, has it failed anywhere?), each time by a few numbers between two steps. So all of them decide alike, and
none waits for one that has given up, whatever its disk let it say.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, Saver
from unisono.train.state.checkpoint.faults import UNTOUCHED, not_written
from unisono.train.state.checkpoint.find import FOLDER
from unisono.train.state.checkpoint.write import bytes_of, discard, free_bytes, no_room

_PAUSE = 0.05  # seconds between two looks at a save that all ranks wait for
_HEAD = 4096  # bytes that a rank writes beside its tensors, and
_LINE = 512  # bytes for each of them, in its file's header and in the manifest


@dataclass(slots=True)
class _InFlight:
    """The last save that was begun. step: 0 once all ranks know how it ended."""

    step: int = 0
    again: int | None = None  # at which step the next is tried
    error: UsageError | None = None  # this rank's, if it failed
    announced: bool = False


@final
class Saving:
    """Saves of one rank of one session. All ranks make the same calls to `save` and `settle`, in the same order.

    world: all ranks. device: theirs. tell(text): notes for the user; only rank 0's are heard. mirror: gets a copy of
    each, from one rank.
    """

    def __init__(
        self,
        saver: Saver,
        world: Group,
        device: torch.device,
        tell: Callable[[str], None],
        mirror: Any = None,
    ) -> None:
        self._saver, self._world, self._device, self._tell = saver, world, device, tell
        self._mirror = mirror
        self._last = _InFlight()

    def poll(self) -> Path | None:
        """The folder of a save that has become whole since the last call, or None. Never waits; what failed is told."""
        self._tell_of_copies()
        if self._last.error is not None or self._saver.writing():
            return None
        try:
            folder = self._saver.wait()
            if folder is not None and self._mirror is not None:
                self._mirror.offer(folder)
            return folder
        except UsageError as error:
            if error.code != "K02":
                raise
            self._last.error = error
            self._complain(error, self._last)
            return None

    def settle(self, must: bool = False) -> Path | None:
        """Wait until the save in flight, if any, is over on all ranks. As `poll`. must: raises UsageError K02 if it
        failed on any."""
        last, folder = self._last, None
        while True:
            writing = self._saver.writing()  # first: what ends after this is looked at in the next turn
            folder = (None if writing else self.poll()) or folder
            ranks = self._gather(writing, last.error is not None, last.step)
            # A rank that has come anew knows of no save: nobody will write its part.
            failed = bool(ranks[:, 1].any()) or bool((ranks[:, 2] != last.step).any())
            if failed:
                self._saver.give_up()
            if not ranks[:, 0].any():
                break
            self._saver.writing(_PAUSE)
        self._last = _InFlight()
        if failed and folder is None:
            if (
                self._saver.rank == 0 or must
            ):  # where it must not fail, all go, and whoever is first ends the others
                discard(self._saver.run_dir, last.step)
            error = last.error or self._not_written(
                last.step, "a rank could not write its part or see the others'"
            )
            if must:
                raise error
            self._complain(error, last)
        return folder

    def save(
        self,
        step: int,
        pieces: Sequence[Box],
        state: dict[str, Any],
        *,
        blocking: bool,
        last: bool = True,
        again: int | None = None,
    ) -> Path | None:
        """Save; the folder, or None if it is not whole yet, or failed. Only after `settle`.

        last: whether it must be whole, or UsageError K02 on all ranks. again: at which step the next save is to come.
        """
        need = bytes_of(pieces) + _HEAD + _LINE * len(pieces)
        ranks = self._gather(need, self._free(), self._saver.tries(step))
        total, free = int(ranks[:, 0].sum()), int(ranks[:, 1].min())
        if total > free:
            error = self._not_written(step, no_room(total, free), errno.ENOSPC)
            if last:
                raise error
            self._complain(error, _InFlight(step, again))
            return None
        self._last = _InFlight(step, again, announced=last)  # the error will tell it
        attempt = int(ranks[:, 2].max()) + 1
        self._saver.begin(step, pieces, state, copied=not blocking, attempt=attempt)
        return self.settle(must=last) if blocking else None

    def beside(self, step: int, pieces: Sequence[Box], state: dict[str, Any]) -> Path | None:
        """Save while the main thread may be in a collective: ranks hear of each other by their files alone. The run
        ends then. Raises UsageError K02."""
        with suppress(UsageError):  # one before it that failed
            self._saver.wait()
        return self._saver.save(step, pieces, state)

    def close(self, seconds: float | None = None) -> None:
        """Wait for copies under way; so long at most, if given."""
        if self._mirror is not None:
            self._mirror.close(seconds)
            self._tell_of_copies()

    def _tell_of_copies(self) -> None:
        while self._mirror is not None and self._mirror.notes:
            self._tell(self._mirror.notes.popleft())

    def _gather(self, *numbers: int) -> Tensor:
        """A row of whole numbers a rank. Every rank calls it, or it hangs."""
        row = torch.tensor([numbers], dtype=torch.int64, device=self._device)
        return self._world.all_gather(row).cpu()

    def _free(self) -> int:
        try:
            return free_bytes(self._saver.run_dir)
        except OSError:  # writing will tell why
            return 1 << 62

    def _not_written(self, step: int, reason: str, number: int | None = None) -> UsageError:
        return not_written(self._saver.run_dir / FOLDER, step, reason, number, self._saver.rank)

    def _complain(self, error: UsageError, last: _InFlight) -> None:
        """A note, once a save."""
        if not last.announced:
            last.announced = True
            then = (
                f"the next is tried at step {last.again}" if last.again is not None else "it is tried again"
            )
            self._tell(f"{error.what.removesuffix(UNTOUCHED)}; training goes on, {then}")

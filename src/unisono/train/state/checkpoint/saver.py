"""The training loop's view: save now, or copy now and write while training goes on."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from unisono.comm.device import drain, host_like, is_apart
from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.write import save


@final
class Saver:
    """Saves of one rank of one run. All ranks make the same calls to `save`, in the same order.

    `token`: a text that all ranks share and that is new each time the run is started or resumed; only its hash
    reaches the disk. `keep`, `keep_every`, `patience`: as in `save`.

    At most one save is in flight. Its errors (those of `save`) are raised by the next `wait` or `save`, once.
    Call `wait` before leaving the process: the writer is a daemon thread.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int = 0,
        world: int = 1,
        *,
        token: str = "",
        keep: int | None = None,
        keep_every: int = 0,
        patience: float = 600.0,
    ) -> None:
        self.run_dir, self.rank = run_dir, rank
        self._token, self._given_up = token, threading.Event()
        self._write = partial(
            save, run_dir, rank=rank, world=world, keep=keep, keep_every=keep_every, patience=patience,
            given_up=self._given_up.is_set,
        )  # fmt: skip
        self._tries: Counter[int] = Counter()
        self._staging: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._done: Path | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, pieces: Sequence[Box], state: dict[str, Any], blocking: bool = True
    ) -> Path | None:
        """Save; returns the folder if blocking.

        Otherwise the pieces are copied into host memory (kept for the next save; as large as what this rank saves)
        and written by a thread: the tensors may be changed as soon as this returns. A save still in flight is
        waited for first.
        """
        self.wait()
        if blocking:
            return self._write(step, pieces, state, token=self._token_of(step, self._tries[step] + 1))
        self.begin(step, pieces, state)
        return None

    def begin(
        self,
        step: int,
        pieces: Sequence[Box],
        state: dict[str, Any],
        *,
        copied: bool = True,
        attempt: int | None = None,
    ) -> None:
        """Write by a thread. Only where the last save was waited for.

        copied: the tensors may be changed as soon as this returns; else not before the save is over. attempt: which
        one of this step it is, the same on all ranks; the next of this rank's if None.
        """
        token = self._token_of(step, self.tries(step) + 1 if attempt is None else attempt)
        self._given_up.clear()
        self._thread = threading.Thread(
            target=self._run,
            args=(step, self._stage(pieces) if copied else pieces, deepcopy(state), token, copied),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._thread.start()

    def tries(self, step: int) -> int:
        """How often this rank has begun to save this step."""
        return self._tries[step]

    def _token_of(self, step: int, attempt: int) -> str:
        self._tries[step] = attempt
        return f"{self._token}/{step}/{attempt}" if self._token else ""

    def give_up(self) -> None:
        """The save in flight has failed elsewhere: it fails here too, as soon as it would wait for others."""
        self._given_up.set()

    def writing(self, seconds: float = 0.0) -> bool:
        """Whether a save is in flight, after waiting so long for its end."""
        if self._thread is None:
            return False
        self._thread.join(seconds)
        return self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait for the save in flight, if any, and return its folder."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        done, error, self._done, self._error = self._done, self._error, None, None
        if error is not None:
            raise error
        return done

    def _run(self, step: int, pieces: Sequence[Box], state: dict[str, Any], token: str, beside: bool) -> None:
        if beside:
            give_way()
        try:
            self._done = self._write(step, pieces, state, token=token)
        except BaseException as error:  # carried to the thread that asked
            self._error = error

    def _stage(self, pieces: Sequence[Box]) -> list[Box]:
        staged: list[Box] = []
        used: set[tuple[str, tuple[int, ...]]] = set()
        devices: set[torch.device] = set()
        for piece in pieces:
            source = piece.tensor.detach()
            if not piece.saved or not source.numel():
                # Only its shape and dtype are looked at, and `meta` keeps no memory alive.
                staged.append(replace(piece, tensor=torch.empty_like(source, device="meta")))
                continue
            key = (piece.name, tuple(piece.start))
            used.add(key)
            buffer = self._staging.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = host_like(source, source.device)
                self._staging[key] = buffer
            buffer.copy_(source, non_blocking=is_apart(source))
            devices.add(source.device)
            staged.append(replace(piece, tensor=buffer))
        for device in devices:
            drain(device)
        for key in self._staging.keys() - used:
            del self._staging[key]
        return staged


def give_way() -> None:
    """Let this thread run where nothing else wants the core. Linux has priorities of threads; others have not."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

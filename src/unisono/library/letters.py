"""Tensors from one rank to another, outside the gradients: `job.ranks.send`, `recv`, `isend`, `irecv`."""

from datetime import timedelta
from typing import Any, final

from torch import Tensor

from unisono.comm.gone import NamedWork
from unisono.comm.group import Group, Pending
from unisono.comm.threads import WorldEnded
from unisono.spec.errors import HangError, UsageError


@final
class Letter:
    """A message under way. Its tensor must not be changed, or read, before `wait`."""

    def __init__(self, pending: Pending, words: str, within: float | None) -> None:
        self._pending, self._words, self._within = pending, words, within

    def wait(self) -> None:
        """Returns when the message is over. Raises HangError (exit 6), naming the other rank, where it is not by its
        deadline, or that rank is gone; the ranks then cannot go on."""
        pending: Any = self._pending
        timed = self._within is not None and isinstance(pending, NamedWork)
        try:
            pending.wait(timedelta(seconds=self._within or 0)) if timed else pending.wait()
        except WorldEnded:
            raise  # ranks on threads, who say themselves who waits for whom
        except RuntimeError as error:
            within = f" within {self._within:g} s" if self._within is not None else ""
            raise HangError(
                f"{self._words}: the other rank was not there{within}",
                where="job.ranks",
                likely=str(error).strip().splitlines()[0][:200],
                fix="see what that rank does at this point; every send needs a recv of the same size and dtype",
            ) from error


def started(group: Group, x: Tensor, peer: int, within: float | None, *, sends: bool) -> Letter:
    """Begin to send x to a rank, or to receive into it. within: seconds that `wait` waits at most; as for all
    collectives of the run if None. Raises UsageError for a rank that is not there."""
    words = f"{'send to' if sends else 'receive from'} rank {peer}"
    if not 0 <= peer < group.size or peer == group.index:
        raise UsageError(
            f"{words}, which is {'this one' if peer == group.index else 'not there'}",
            where="job.ranks",
            fix=f"another rank of {group.size}",
            code="J22",
        )
    if not x.is_contiguous():
        raise UsageError(
            f"{words} of a tensor with gaps", where="job.ranks", fix="x.contiguous()", code="J22"
        )
    begin = group.start_send if sends else group.start_recv
    return Letter(begin(x.detach(), peer), words, within)

"""Memory that the ranks of one host all see: anonymous files, which each rank makes and maps of all others.

A file without a name goes when the last process goes that has it, however that ends: nothing is left in /dev/shm.
"""

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.gone import started

_NAME, _DOING = "unisono-buffer", "the making of shared memory"
_HEAD = 4096  # bytes before the numbers; the first eight are a token that tells the file from any other
_HUGE = 8 << 20  # bytes from which large pages pay
_HUGE_PAGES, _POPULATE_WRITE = 14, 23  # Linux's numbers
_LINE = 16  # elements, so that no two ranks write to one line of a cache


def part_of(numel: int, index: int, size: int) -> slice:
    """The elements that one member adds up, of `numel`."""
    lines = -(-numel // _LINE)
    begin, end = (min(numel, lines * i // size * _LINE) for i in (index, index + 1))
    return slice(begin, end)


def mapped(
    pg: dist.ProcessGroup, numel: int, dtype: torch.dtype, makers: int | None = None
) -> tuple[Tensor, ...] | None:
    """Zeros [numel] of every member, in order, which each member sees; None, for all of them, where one cannot: another
    host or network, no such memory. makers: of the first so many alone. Every member of the group calls it, or it
    hangs."""
    size, index = pg.size(), pg.rank()
    makers = size if makers is None else makers
    nbytes = _HEAD + numel * dtype.itemsize
    token = secrets.randbits(62)
    file = _anonymous_file(nbytes, token) if index < makers else -1
    offers = torch.zeros(size, 4, dtype=torch.int64)
    offers[index] = torch.tensor([os.getpid(), file, token, _network()])
    started(pg, _DOING, pg.allreduce, [offers]).wait()
    maps = [_opened(offer, nbytes) for offer in offers[:makers].tolist()]
    votes = torch.tensor([float(all(memory is not None for memory in maps))])
    started(pg, _DOING, pg.allreduce, [votes]).wait()  # by then everybody has opened what there is
    if file >= 0:
        os.close(file)
    if votes.item() < size:
        return None
    return tuple(memory[_HEAD:].view(dtype) for memory in maps if memory is not None)


def _anonymous_file(nbytes: int, token: int) -> int:
    """An anonymous file of so many bytes, which begins with the token; -1 where the system has none."""
    try:
        file = os.memfd_create(_NAME)
    except (AttributeError, OSError):
        return -1
    try:
        os.ftruncate(file, nbytes)
        os.pwrite(file, token.to_bytes(8, "little"), 0)
    except OSError:
        os.close(file)
        return -1
    return file


def _opened(offer: Sequence[int], nbytes: int) -> Tensor | None:
    """What a process made, as bytes, if it is on this host and lets us. offer: process, file, token, network."""
    pid, file, token, network = offer
    path = f"/proc/{pid}/fd/{file}"
    # In another container the same numbers may be those of any file, which must not be touched.
    with suppress(OSError, RuntimeError):
        if network == _network() and _NAME in os.readlink(path) and os.stat(path).st_size == nbytes:
            opened = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            if int.from_bytes(opened[:8].numpy().tobytes(), "little") == token:
                _touch(opened)
                return opened
    return None


def _touch(x: Tensor) -> None:
    """Give a mapping all its pages, large ones if the system has them for such files. Raises OSError where memory is
    short: one by one, they would come inside the first operations, and a missing one would end the process."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # such files are Linux's
    large = x.nbytes >= _HUGE  # a small one would take a whole large page
    for advice in (_HUGE_PAGES, _POPULATE_WRITE)[not large :]:
        if madvise(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), advice):
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # else a system that knows no such advice
                raise OSError(number, os.strerror(number))


def _network() -> int:
    """The number of this process's network: ranks in two of them are on two hosts, if only to the eye."""
    with suppress(OSError):
        return Path("/proc/self/ns/net").stat().st_ino
    return 0

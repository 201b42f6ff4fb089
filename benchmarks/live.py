"""Bytes of tensors that are alive on a rank, and the most there were: every storage that an operation gives is counted
until it is gone."""

import gc
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.parallel.offload.store import Store
from unisono_contrib.train.watch.held_tensors import held_by


class LiveBytes(TorchDispatchMode):
    """Counts on this thread while it is entered. held: tensors that are there already and count too. store: what lies
    there is away, and does not.

    most: bytes. at: the operation at whose end they were the most. sizes: of the storages at that moment, the largest
    first. Views count with what they look at. A storage counts with the size that it has at that moment: FSDP2 takes
    what it gathered away by shrinking it, which is no operation.
    """

    def __init__(self, held: list[Tensor], store: Store | None = None) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self._store = store
        self.most = 0
        self.at = ""
        self.sizes: list[int] = []
        for x in held:
            self._see(x)
        self._sweep("")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self._see(x)
        self._sweep(str(func))
        return result

    def _see(self, x: Tensor) -> None:
        try:
            storage = x.untyped_storage()
        except NotImplementedError:
            return
        known = self._alive.get(storage._cdata)
        if known is not None and not known.expired():
            return
        if x.device.type != "meta" and (self._store is None or not self._store.holds(x)):
            self._alive[storage._cdata] = StorageWeakRef(storage)

    def _sweep(self, at: str) -> None:
        there = {
            key: storage.nbytes()
            for key, ref in self._alive.items()
            if (storage := UntypedStorage._new_with_weak_ptr(ref.cdata)) is not None
        }
        if len(there) < len(self._alive):
            self._alive = {key: self._alive[key] for key in there}
        if (now := sum(there.values())) > self.most:
            self.most, self.at = now, at
            self.sizes = sorted(there.values(), reverse=True)


def live_peak(run: Any, play: Any) -> LiveBytes:
    """What `play()` takes at its peak, beside what the run holds."""
    gc.collect()
    with LiveBytes([x for kind in held_by(run).values() for x in kind], run.local.store) as seen:
        play()
    return seen

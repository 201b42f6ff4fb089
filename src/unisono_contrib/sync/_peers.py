"""Messages between replicas that need not wait for all others: what one tells some, and hears from some.

All are begun at once. Each rank begins its part of them in one order of all pairs, so that backends that make a
connection with a first message do not wait in a circle.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.pairs import pairs_of


class Peers:
    """The messages of one rank. group: the replicas. codec: under which their bytes are counted, "" for none. Every
    member makes it, or it hangs."""

    def __init__(self, group: Group, device: torch.device, codec: str = "") -> None:
        self.group, self.codec = group, codec
        self._queues = pairs_of(group, device) or group

    def swap(
        self, said: Mapping[int, Sequence[Tensor]], heard: Iterable[int], like: Sequence[Tensor]
    ) -> dict[int, list[Tensor]]:
        """Send `said` to each replica that it names, and return what each of `heard` has sent, tensors `like` these.
        It hangs unless each of them calls it for the same messages."""
        places = {j: [torch.empty_like(x) for x in like] for j in heard}
        me, recorder, pending = self.group.index, self.group.recorder, []
        # Of each pair, messages to the higher replica come first.
        order = sorted((min(me, j), max(me, j), me > j, j, True) for j in said)
        order += sorted((min(me, j), max(me, j), me < j, j, False) for j in places)
        recorder.codec = self.codec
        with recorder.span("comm", axis=self.group.axis, op="send", exposed=True):
            for _, _, _, j, sends in sorted(order):
                for x in said[j] if sends else places[j]:
                    pending.append(self._queues.start_send(x, j) if sends else self._queues.start_recv(x, j))
            recorder.codec = ""
            for each in pending:
                each.wait()
        return places


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One flat tensor for each dtype, in the order in which dtypes come."""
    by: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        by.setdefault(x.dtype, []).append(x.reshape(-1))
    return [torch.cat(parts) for parts in by.values()]


def unpacked(flats: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Views of flat tensors in the order and the shapes of `like`, whose dtypes `packed` has seen; theirs may differ
    from the flat tensors'."""
    kinds = list(dict.fromkeys(x.dtype for x in like))
    parts = {
        kind: iter(flat.split([x.numel() for x in like if x.dtype == kind]))
        for kind, flat in zip(kinds, flats, strict=True)
    }
    return [next(parts[x.dtype]).view(x.shape) for x in like]

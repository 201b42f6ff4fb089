"""Exchanges between ranks beside the gradients: seeds, sums, comparisons, and values of the script.

Values are plain ones, tensors, arrays and paths, in lists, tuples and dicts. No pickle.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.spec.errors import UsageError

PACK_BYTES = 16 << 20


class ScalarExchange:
    """Exchanges of a few numbers over the data ranks; `device` is where the backend wants them."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device

    def sums(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks."""
        if self.group.size == 1:
            return [float(v) for v in values]
        line = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.group.all_reduce(line).tolist()

    def gather(self, number: int) -> list[int]:
        """Every rank's number, by rank."""
        return [row[0] for row in self.rows([number])]

    def rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank; all give as many."""
        line = torch.tensor([list(numbers)], dtype=torch.int64, device=self.device)
        return self.group.all_gather(line).tolist()

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, of the same shape and dtype on every rank; on the CPU."""
        return self.group.broadcast(x.to(self.device)).cpu()


@torch.no_grad()
def spread(tensors: Sequence[Tensor], group: Group) -> None:
    """Overwrite the tensors with those of the group's first rank, many in one broadcast."""
    if group.size == 1:
        return
    run: list[Tensor] = []
    for x in (*tensors, None):
        full = sum(r.nbytes for r in run) > PACK_BYTES
        if run and (x is None or full or x.dtype != run[0].dtype or x.device != run[0].device):
            flat = group.broadcast(torch.cat([r.detach().reshape(-1) for r in run]))
            for r, part in zip(run, flat.split([r.numel() for r in run]), strict=True):
                r.detach().copy_(part.view(r.shape))
            run = []
        if x is not None:
            run.append(x)


_PLAIN = (bool, int, float, str, type(None))


def encoded(value: Any) -> bytes:
    """Return a value as bytes. Raises UsageError J22 for a value that ranks do not send each other."""
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, blobs, "the value")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


def decoded(data: bytes) -> Any:
    """The reverse of `encoded`; tensors are on the CPU."""
    size = int.from_bytes(data[:8], "little")
    return _decode(json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :])


def from_main(value: Any, exchange: ScalarExchange, source: int = 0) -> Any:
    """Return the value of the rank at index `source`, on every rank."""
    group, device = exchange.group, exchange.device
    if group.size == 1:
        return value
    data = encoded(value) if group.index == source else b""
    size = group.broadcast(torch.tensor([len(data)], device=device), source)
    line = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8).to(device)
    line = group.broadcast(line, source)
    return value if group.index == source else decoded(line.cpu().numpy().tobytes())


def of_each(value: Any, exchange: ScalarExchange) -> list[Any]:
    """Return every rank's value, by rank, on every rank."""
    group, device = exchange.group, exchange.device
    if group.size == 1:
        return [value]
    data = encoded(value)
    sizes = group.all_gather(torch.tensor([len(data)], device=device)).tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = group.all_gather(room).view(group.size, -1).cpu()
    return [decoded(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _encode(value: Any, blobs: list[bytes], where: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "t"
        return [kind, [_encode(x, blobs, f"{where}[{i}]") for i, x in enumerate(value)]]
    if isinstance(value, Mapping):
        rows = ((_encode(k, blobs, "a key"), _encode(x, blobs, f"{where}[{k!r}]")) for k, x in value.items())
        return ["d", [list(row) for row in rows]]
    if isinstance(value, Path):
        return ["p", str(value)]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        x = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        start = sum(map(len, blobs))
        blobs.append(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        kind = "x" if isinstance(value, Tensor) else "n"
        return [kind, str(x.dtype).removeprefix("torch."), list(x.shape), start]
    raise UsageError(
        f"{where} is a {type(value).__name__}, which ranks do not send each other",
        where="job.ranks",
        fix="numbers, text, tensors and arrays, in lists, tuples and dicts",
        code="J22",
    )


def _decode(code: Any, blobs: memoryview) -> Any:
    if not isinstance(code, list):
        return code
    kind, *rest = code
    if kind == "d":
        return {_decode(key, blobs): _decode(x, blobs) for key, x in rest[0]}
    if kind in "lt":
        values = [_decode(x, blobs) for x in rest[0]]
        return values if kind == "l" else tuple(values)
    if kind == "p":
        return Path(rest[0])
    dtype, shape, start = getattr(torch, rest[0]), rest[1], rest[2]
    x = torch.empty(shape, dtype=dtype)
    data = bytearray(blobs[start : start + x.nbytes])
    if data:
        x = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
    return x if kind == "x" else x.numpy()

"""Values that ranks tell each other: plain ones, tensors, arrays and paths, in lists, tuples and dicts. No pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.library.small import Small
from unisono.spec.errors import UsageError

_PLAIN = (bool, int, float, str, type(None))


def encoded(value: Any) -> bytes:
    """Raises UsageError J22 for what is none of these."""
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, blobs, "the value")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


def decoded(data: bytes) -> Any:
    """The reverse of `encoded`; tensors are on the CPU."""
    size = int.from_bytes(data[:8], "little")
    return _decode(json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :])


def from_main(value: Any, small: Small, source: int = 0) -> Any:
    """The value of the rank at index `source`, on every rank."""
    group, device = small.group, small.device
    if group.size == 1:
        return value
    own = encoded(value) if group.index == source else b""
    size = group.broadcast(torch.tensor([len(own)], device=device), source)
    line = torch.frombuffer(bytearray(own or int(size)), dtype=torch.uint8).to(device)
    line = group.broadcast(line, source)
    return value if group.index == source else decoded(line.cpu().numpy().tobytes())


def of_each(value: Any, small: Small) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    group, device = small.group, small.device
    if group.size == 1:
        return [value]
    own = encoded(value)
    sizes = group.all_gather(torch.tensor([len(own)], device=device)).tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    room[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
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


def _decode(made: Any, blobs: memoryview) -> Any:
    if not isinstance(made, list):
        return made
    kind, *rest = made
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

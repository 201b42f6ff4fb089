"""Letters: tensors of a peer as objects that are read whole or not at all, whatever the store shows of a write.

A letter is two objects. Its body, `NAME-DIGEST.safetensors`, is named by what is in it. Its seal, `NAME.json`, is put
there after it: a line of JSON with the body's length and SHA-256, and below it the line's own. A reader takes what both
agree on. All else, an object that is truncated, absent or another's, is a letter that is not there yet.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import fsum, isfinite
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from unisono.comm.tree import tree_sum
from unisono.spec.errors import UsageError
from unisono_contrib.comm.depot import Depot

PEER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What names a peer, and so its files."""
SEAL = ".json"
SEAL_LIMIT = 1 << 20
"""Bytes of a seal at most."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What one peer has posted in one round. weight: what its tensors count for in a mean, such as the tokens that it
    has trained on. meta: whatever else is JSON."""

    peer: str
    round: int
    weight: float
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)


def post(depot: Depot, folder: str, letter: Letter) -> bool:
    """Put a letter into a folder under its peer's name; whether it is the first one there. A letter that is sealed
    stays: a peer that posts once more in a round, because it was started anew, changes nothing of what others have
    read. Raises UsageError (L05) for tensors that have no mean."""
    if not (isfinite(letter.weight) and letter.weight >= 0):
        raise _wrong(f"the weight {letter.weight} of peer {letter.peer} is no number of samples")
    for name, x in letter.tensors.items():
        if not x.is_floating_point():
            raise _wrong(f"tensor {name} of peer {letter.peer} is {x.dtype}, of which there is no mean")
    body = save({name: whole(x) for name, x in letter.tensors.items()})
    head = {
        "peer": letter.peer, "round": letter.round, "weight": letter.weight, "meta": dict(letter.meta),
        "bytes": len(body), "sha256": sha256(body).hexdigest(),
    }  # fmt: skip
    depot.write(_body(folder, letter.peer, str(head["sha256"])), body)
    return create(depot, f"{folder}/{letter.peer}{SEAL}", head)


def read(depot: Depot, folder: str, peer: str) -> Letter | None:
    """The letter of a peer in a folder; None as long as it is not whole. Tensors are on the CPU."""
    if not PEER.fullmatch(peer):
        return None
    head = unsealed(depot, f"{folder}/{peer}{SEAL}")
    try:
        if head is None or head["peer"] != peer:
            return None
        body = depot.read(_body(folder, peer, head["sha256"]), head["bytes"])
        if len(body) != head["bytes"] or sha256(body).hexdigest() != head["sha256"]:
            return None
        return Letter(peer, int(head["round"]), float(head["weight"]), load(body), head["meta"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


def _body(folder: str, peer: str, digest: str) -> str:
    return f"{folder}/{peer}-{digest[:16]}.safetensors"


def create(depot: Depot, path: str, said: Mapping[str, Any]) -> bool:
    """Write JSON and its checksum where nothing sealed is yet; whether it is this one. What is there and broken, as a
    writer leaves it that dies on a store without whole writes, is replaced."""
    content = sealed(said)
    if depot.create(path, content):
        return True
    if unsealed(depot, path) is not None:
        return False
    depot.write(path, content)
    return True


def sealed(said: Mapping[str, Any]) -> bytes:
    """JSON on one line, and on the next one its SHA-256."""
    line = json.dumps(said, sort_keys=True).encode()
    return line + b"\n" + sha256(line).hexdigest().encode() + b"\n"


def unsealed(depot: Depot, path: str) -> dict[str, Any] | None:
    """What `sealed` wrote to a file; None where it is not there or not whole."""
    try:
        line, check, rest = depot.read(path, SEAL_LIMIT).split(b"\n")
        said = json.loads(line) if not rest and check.decode() == sha256(line).hexdigest() else None
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def mean(letters: Sequence[Letter]) -> dict[str, Tensor]:
    """The mean of what letters hold, each counting for its weight. All must have the same names, shapes and dtypes.

    The bits are those of a sum over `dp` in which each replica has scaled its own by its share, weight / all weights,
    if replicas have the order of `letters`: both add up along one tree (`comm.tree`). Raises UsageError (L05).
    """
    total = fsum(letter.weight for letter in letters)
    if not letters or total <= 0:
        raise _wrong("no letter of this round counts for anything")
    first = letters[0]
    for other in letters[1:]:
        if other.tensors.keys() != first.tensors.keys():
            name = min(other.tensors.keys() ^ first.tensors.keys())
            raise _wrong(f"of peers {first.peer} and {other.peer} only one has posted tensor {name}")
        for name, x in first.tensors.items():
            if (like := other.tensors[name]).shape != x.shape or like.dtype != x.dtype:
                what = f"tensor {name} is {list(x.shape)} {x.dtype} of peer {first.peer}"
                raise _wrong(f"{what}, and {list(like.shape)} {like.dtype} of peer {other.peer}")
    shares = [letter.weight / total for letter in letters]
    return {
        name: tree_sum([letter.tensors[name] * share for letter, share in zip(letters, shares, strict=True)])
        for name in first.tensors
    }


def whole(x: Tensor) -> Tensor:
    """On the CPU, in memory of its own: views of one buffer cannot be written."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _wrong(what: str) -> UsageError:
    likely = "peers that train other models, or were started with other options"
    return UsageError(what, where="the mailbox", likely=likely, fix="start all peers alike", code="L05")

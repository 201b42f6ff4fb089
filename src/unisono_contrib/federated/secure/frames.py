"""Requests and replies of a secure round as messages of a link: facts in JSON, bytes as hex, vectors as tensors.

Who a reply is from is known by the link that it came over; what it says of itself does not count.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono_contrib.federated.secure.messages import (
    SHARE_BYTES,
    Advertise,
    Mask,
    Masked,
    PublicKeys,
    Reply,
    Request,
    Reveal,
    Revealed,
    Sealed,
    Share,
)

Body = tuple[dict[str, Any], dict[str, Tensor]]
VECTOR = "vector"


def step_of(request: Request) -> str:
    """`advertise`, `share`, `mask` or `reveal`."""
    return type(request).__name__.lower()


def request_body(request: Request) -> dict[str, Any]:
    match request:
        case Advertise():
            return {"threshold": request.threshold}
        case Share():
            keys = [
                [each.client, each.sealing.hex(), each.masking.hex()] for each in request.directory.values()
            ]
            return {"directory": keys, "weight": request.weight}
        case Mask():
            return {"letters": [[each.sender, each.body.hex()] for each in request.letters]}
        case Reveal():
            return {"survivors": sorted(request.survivors)}


def request_of(step: str, facts: Mapping[str, Any], client: int) -> Request:
    """The request of this name to client `client`, from 1. Raises KeyError, TypeError, ValueError for what
    `request_body` has not made."""
    match step:
        case "advertise":
            return Advertise(int(facts["threshold"]))
        case "share":
            keys = [PublicKeys(int(n), bytes.fromhex(a), bytes.fromhex(b)) for n, a, b in facts["directory"]]
            return Share({each.client: each for each in keys}, float(facts["weight"]))
        case "mask":
            return Mask([Sealed(int(sender), client, bytes.fromhex(x)) for sender, x in facts["letters"]])
        case "reveal":
            return Reveal(frozenset(int(number) for number in facts["survivors"]))
    raise ValueError(f"no request of a secure round: {step!r}")


def reply_body(reply: Reply) -> Body:
    match reply:
        case PublicKeys():
            return {"sealing": reply.sealing.hex(), "masking": reply.masking.hex()}, {}
        case Masked():
            return {}, {VECTOR: torch.from_numpy(reply.vector.view(np.int64))}
        case Revealed():
            sides = {"self_masks": reply.self_masks, "keys": reply.keys}
            return {name: [[n, f"{x:x}"] for n, x in each.items()] for name, each in sides.items()}, {}
    return {"letters": [[each.receiver, each.body.hex()] for each in reply]}, {}


def reply_of(step: str, body: Body, client: int) -> Reply:
    """What client `client`, from 1, replies to the request of this name. Raises KeyError, TypeError, ValueError for
    what `reply_body` has not made."""
    facts, tensors = body
    match step:
        case "advertise":
            keys = PublicKeys(client, bytes.fromhex(facts["sealing"]), bytes.fromhex(facts["masking"]))
            if keys.nbytes != 64:
                raise ValueError("public keys of 32 bytes each")
            return keys
        case "share":
            return [Sealed(client, int(receiver), bytes.fromhex(x)) for receiver, x in facts["letters"]]
        case "mask":
            vector = tensors[VECTOR]
            if vector.dtype != torch.int64 or vector.dim() != 1:
                raise ValueError("a masked vector of 64-bit integers")
            return Masked(client, vector.numpy().view(np.uint64))
        case "reveal":
            return Revealed(client, _shares(facts["self_masks"]), _shares(facts["keys"]))
    raise ValueError(f"no request of a secure round: {step!r}")


def _shares(rows: Any) -> dict[int, int]:
    shares = {int(number): int(text, 16) for number, text in rows}
    if any(not 0 <= share < 1 << (8 * SHARE_BYTES) for share in shares.values()):
        raise ValueError("a share of more bits than it can have")
    return shares

"""A codec between two replicas, where it was written for a sum over all: what one encodes, and any other one decodes.

A codec asks for sums and gathers. Of one replica alone they are answered by what it asks them of, and that is its
payload. Who gets the payload plays the same codec on zeros, and answers by the payload in the place of its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Deal, Gather, Request, Sent


def encode(coder: Coder, flat: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> list[Tensor]:
    """What the codec of this replica has to tell others of flat [n], which stays as it is."""
    payload: list[Tensor] = []

    def answer(request: Request) -> Tensor:
        if not isinstance(request, Deal):  # parts of a sum that is gathered afterwards
            payload.append(request.tensor.clone())
        return _alone(request)

    _play(coder, flat.clone(), shapes, memory, answer)
    return payload


def decode(
    coder: Coder, payload: Sequence[Tensor], like: Tensor, shapes: Sequence[Size], memory: BucketMemory
) -> Tensor:
    """[n], as `like`: what `encode` made the payload of, but for what the codec loses. All replicas get the same
    bits."""
    rest = iter(payload)

    def answer(request: Request) -> Tensor:
        if not isinstance(request, Deal):
            request.tensor.copy_(next(rest).view_as(request.tensor))
        return _alone(request)

    return _play(coder, torch.zeros_like(like), shapes, memory, answer).clone()


def _alone(request: Request) -> Tensor:
    """The answer that a group of one gives."""
    match request:
        case Gather(tensor, into) if into is not None:
            into.copy_(tensor)
            return into.view(1, -1)
        case Gather(tensor) | Deal(tensor):
            return tensor.view(1, -1)
        case _:
            return request.tensor


def _play(
    coder: Coder,
    flat: Tensor,
    shapes: Sequence[Size],
    memory: BucketMemory,
    answer: Callable[[Request], Tensor],
) -> Tensor:
    exchange, said = coder.exchange(flat, shapes, memory), None
    while True:
        try:
            request = exchange.send(said)
        except StopIteration as end:
            return end.value
        if isinstance(request, Sent):
            said = None
        elif isinstance(request, tuple):
            said = tuple(map(answer, request))
        else:
            said = answer(request)

"""What the server decodes is what the client's codec says, for every codec of the house."""

import pytest
import torch

from unisono.codecs import CODECS
from unisono_contrib.federated.wire import DeltaCodec

SHAPES = {"a.weight": (40, 33), "a.bias": (33,), "b.weight": (7, 40, 3)}
NAMED = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
NUMEL = sum(x.numel() for x in NAMED.values())
TEXTS = [
    *(name for name in CODECS.names() if name != "auto"),
    "topk:ratio=0.05+ef",
    "int4+ef",
    "powersgd:r=2+ef",
]


def delta(number: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("text", TEXTS)
def test_the_server_decodes_what_the_client_has_sent(text: str) -> None:
    """Three deltas of one client; over the wire the server sees the parts alone, and its error is the codec's."""
    client, server = (DeltaCodec(text, NAMED, seed=3) for _ in range(2))
    kept, server_kept = client.initial(), server.initial()
    alone, alone_kept = DeltaCodec(text, NAMED, seed=3), client.initial()
    for number in range(3):
        parts = client.encode(delta(number), kept, number)
        _, wanted = alone._play(delta(number), alone_kept, number, None)
        decoded = server.decode(parts, server_kept, number)
        assert torch.equal(decoded, wanted)
        if text == "plain":
            assert torch.equal(decoded, delta(number))


def test_error_feedback_sends_later_what_it_has_not_sent() -> None:
    codec = DeltaCodec("topk:ratio=0.25,dense=0+ef", NAMED, seed=0)
    kept, server_kept, total = codec.initial(), codec.initial(), torch.zeros(NUMEL)
    for number in range(4):
        total += codec.decode(codec.encode(delta(number), kept, number), server_kept, number)
    left = sum(delta(number) for number in range(4)) - total
    assert torch.allclose(kept["left"], left, atol=1e-5) and left.norm() > 0


def test_what_is_no_delta_is_refused() -> None:
    codec = DeltaCodec("plain", NAMED, seed=0)
    for parts in ([], [torch.zeros(3)], [torch.zeros(NUMEL, dtype=torch.float64)]):
        with pytest.raises(ValueError, match="no delta"):
            codec.decode(parts, codec.initial(), 0)

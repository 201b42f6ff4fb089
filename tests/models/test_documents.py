"""Several documents in one window are computed as each would be alone."""

import pytest
import torch

from tests.models.test_gpt import VARIANTS, small
from unisono.models.documents import Documents
from unisono.models.noise import Noise

LENGTHS = (3, 1, 4)
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]


def test_positions_begin_anew_with_each_document():
    two = torch.cat((IDS, torch.tensor([[5, 5, 5, 5, 5, 4, 4, 5]])))
    assert Documents.of(two).positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1, 0]]
    assert Documents.of(two).samples(1, 1).ids.tolist() == two[1:].tolist()


@pytest.mark.parametrize("changes", [*VARIANTS, {"dropout": 1e-12}])
def test_a_document_in_a_window_is_what_it_is_alone(changes):
    model, tokens = small(**changes), torch.randint(0, 31, (1, 8))
    noise = Noise(0 if "dropout" in changes else None, torch.arange(1), documents=Documents.of(IDS))
    together = model(tokens, noise)
    alone = torch.cat([model(part) for part in tokens.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(model(tokens)[:, 3:], together[:, 3:])


def test_nothing_is_dropped_without_a_seed():
    model, tokens = small(dropout=0.5), torch.randint(0, 31, (2, 8))
    assert torch.equal(model(tokens, Noise(None, torch.arange(2))), model(tokens))

"""A model of your own for a recipe: `[model] kind = "examples/own_model.py:smoother"`.

The function may name any of config, vocab, context, classes, sample_shape; the loss is cross-entropy unless the
module has a `loss(logits, targets)` of its own that sums over the targets. A module with the parts `stem`, `blocks` and
`head` and an `anatomy` can be cut by pp and tp as well; as it stands, dp and shard spread it.

    unisono train examples/stdlib_gpt.toml --model.kind examples/own_model.py:smoother --plan "dp=2"
"""

import torch
from torch import Tensor, nn


class Smoother(nn.Module):
    """Each next byte from running means of what came before, at several speeds: no attention, and quick."""

    decay: Tensor

    def __init__(self, vocab: int, width: int, speeds: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(
            nn.Linear(width * (speeds + 2), 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, vocab)
        self.register_buffer("decay", 1 - 0.5 ** torch.arange(1, speeds + 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, T, width]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        lag = (place[:, None] - place[None, :]).clamp(min=0)
        past = (place[:, None] >= place[None, :]).to(x.dtype)
        means = [torch.einsum("ts,bsw->btw", past * (1 - d) * d**lag, x) for d in self.decay.to(x.dtype)]
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.head(self.mix(torch.cat([x, before, *means], dim=-1)))


def smoother(vocab: int, config: object) -> nn.Module:
    """The model of a recipe: as wide as `model.d_model`."""
    return Smoother(vocab, getattr(config, "d_model", 64))

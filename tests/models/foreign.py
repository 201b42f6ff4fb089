"""Models as others write them: plain modules that know nothing of this house."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, PLACES = 23, 12


class GatedMixer(nn.Module):
    """Mixes tokens, then channels behind a gate; the classifier is the embedding."""

    def __init__(self, vocab: int = TOKENS, places: int = PLACES, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over, self.back = nn.Linear(places, 24), nn.Linear(24, places)
        self.up, self.down = nn.Linear(width, 64, bias=False), nn.Linear(32, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.back(F.gelu(self.over(self.first(x).transpose(1, 2)))).transpose(1, 2)
        gate, value = self.up(self.second(x)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * value)
        return F.linear(x, self.embed.weight)


class HandAttention(nn.Module):
    """Attention written out: fused projection, a bias shared by both layers, a mask, dropout on three places."""

    def __init__(self, vocab: int = TOKENS, places: int = PLACES, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(vocab, width), nn.Parameter(torch.randn(1, places, width) * 0.1)
        self.bias = nn.Parameter(torch.randn(heads, places, places) * 0.1)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.norm, layer.qkv, layer.out = (
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )
            layer.mlp = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
            )
            self.layers.append(layer)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, places = tokens.shape
        x = self.embed(tokens) + self.place[:, :places]
        for layer in self.layers:
            made = layer.qkv(layer.norm(x)).reshape(batch, places, 3, self.heads, -1)  # type: ignore[operator]
            q, k, v = made.permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.bias
            later = torch.ones(places, places, dtype=torch.bool, device=tokens.device).triu(1)
            weights = self.drop(scores.masked_fill(later, torch.finfo(scores.dtype).min).softmax(-1))
            mixed = (weights @ v).transpose(1, 2).reshape(batch, places, -1)
            x = x + self.drop(layer.out(mixed))  # type: ignore[operator]
            x = x + self.drop(layer.mlp(x))  # type: ignore[operator]
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, which keeps queries, keys and values in one weight and puts positions first."""

    def __init__(self, vocab: int = TOKENS, width: int = 16, drop: float = 0.1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=drop, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        return self.head(self.layers(x, mask=mask, is_causal=True))


def twice(inner: int, outer: int) -> nn.Sequential:
    """Two convolutions, each with a norm of groups."""
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU(),
        nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with two skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.deep = twice(1, 8), twice(8, 16), twice(16, 16)
        self.up, self.top, self.head = twice(32, 8), twice(16, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        deep = F.interpolate(self.deep(F.max_pool2d(two, 2)), scale_factor=2)
        up = F.interpolate(self.up(torch.cat([deep, two], 1)), scale_factor=2)
        return self.head(self.top(torch.cat([up, one], 1)).mean((2, 3)))


class Residual(nn.Module):
    """A block of a residual network: batch norms, and operators in place."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
        )
        self.norm, self.after, self.relu = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer))
            if inner != outer
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        same = x if self.down is None else self.down(x)
        y = self.after(self.second(self.relu(self.norm(self.first(x)))))
        y += same
        return self.relu(y)


def resnet() -> nn.Module:
    """Small, in a plain `nn.Sequential`."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Residual(8, 8), Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class Smoothed(nn.Module):
    """Returns two outputs, which its own loss looks at, with smoothed targets."""

    def __init__(self, vocab: int = TOKENS, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head, self.aux = (
            nn.Embedding(vocab, width),
            nn.Linear(width, vocab),
            nn.Linear(width, vocab),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        return self.head(x + self.mlp(x)), self.aux(x)

    def loss(self, made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        shares = zip((1.0, 0.3), made, strict=True)
        return sum(  # type: ignore[return-value]
            share * F.cross_entropy(y.flatten(0, -2), targets.flatten(), reduction="sum", label_smoothing=0.1)
            for share, y in shares
        )


class Pair(nn.Module):
    """Two inputs, which it unpacks from one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 48), nn.Linear(32, 48)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(1)
        return flat[:, :32], flat[:, 32:]

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(left), self.right(right)], -1))


class Branching(nn.Module):
    """Decides by its numbers: no graph follows that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.head = nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x.flatten(1)))
        if y.sum() > 0:
            y = y * 2
        return self.head(y)


def hand(vocab: int, context: int) -> nn.Module:
    return HandAttention(vocab, context)


def mixer(vocab: int, context: int) -> nn.Module:
    return GatedMixer(vocab, context)


def encoder(vocab: int) -> nn.Module:
    return Encoder(vocab)


def smoothed(vocab: int) -> nn.Module:
    return Smoothed(vocab)


def unet(classes: int) -> nn.Module:
    return UNet()


def residual(classes: int) -> nn.Module:
    return resnet()


def pair(classes: int) -> nn.Module:
    return Pair()


def narrow(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))


def branching(classes: int) -> nn.Module:
    return Branching()

"""A decoder-only transformer: GPT-2's or Llama's, by its settings. It knows nothing of parallelism.

Shapes: B batch, T positions, D width, H query heads, G key/value heads, K head width, F hidden width, V vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.gpt import GPTConfig
from unisono.models.init import Rule
from unisono.models.noise import Dropout, Noise, numbers
from unisono.spec.layout import Anatomy, Places, Split, Units


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, bias=config.bias)


class Positions(nn.Module):
    """Adds a learned row per position; `places` says which positions those of x [B, T', D] are, if not the first.
    Positions begin anew with each document."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))
        self.places: Places | None = None

    def forward(self, x_BTD: Tensor, noise: Noise | None = None) -> Tensor:
        if noise is not None and noise.documents is not None:
            places = numbers(self.places or Places.whole(x_BTD.shape[1]), x_BTD.device)
            return x_BTD + F.embedding(noise.documents.positions[:, places], self.weight)
        held = ((0, x_BTD.shape[1]),) if self.places is None else self.places.stretches
        rows = [self.weight[first : first + size] for first, size in held]
        return x_BTD + (rows[0] if len(rows) == 1 else torch.cat(rows))


class Stem(nn.Module):
    """Tokens [B, T] → residual stream [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocab or 0, config.d_model)
        self.pos = Positions(config.context, config.d_model) if config.positions == "learned" else None
        self.drop = Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, noise: Noise | None = None) -> Tensor:
        x_BTD = self.tok(tokens_BT)
        if self.pos is not None:
            x_BTD = self.pos(x_BTD, noise)
        return self.drop(x_BTD, noise)


def rotate(x_BHTK: Tensor, theta: float, steps: Tensor) -> Tensor:
    """Rotary positions, half-split convention (Su et al., RoFormer, 2021). steps: the positions of x, [T], or [B, 1, T]
    where samples differ."""
    half = x_BHTK.shape[-1] // 2
    speed_K = theta ** (-torch.arange(half, device=x_BHTK.device, dtype=torch.float32) / half)
    angle = steps.to(torch.float32)[..., None] * speed_K
    cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
    a, b = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Unturned(nn.Identity):
    """In the place of `Rotary` where positions enter elsewhere."""

    def forward(self, input: Tensor, noise: Noise | None = None) -> Tensor:
        return input


class Rotary(nn.Module):
    """Turns queries or keys x [B, H, T', K] by their positions; `places` says which they are, if not the first.
    Positions begin anew with each document."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.places: Places | None = None

    def forward(self, x_BHTK: Tensor, noise: Noise | None = None) -> Tensor:
        steps = numbers(self.places or Places.whole(x_BHTK.shape[-2]), x_BHTK.device)
        if noise is not None and noise.documents is not None:
            steps = noise.documents.positions[:, None, steps]
        return rotate(x_BHTK, self.theta, steps)


class Core(nn.Module):
    """Attention of queries [B, H, T, K] to keys and values [B, G, T, K] of the same document → [B, H, T, K]; nothing
    is learned here, so a pass over the model may put another way of computing it in this one's place. causal: a query
    sees no later keys."""

    def __init__(self, drop: Dropout, causal: bool = True) -> None:
        super().__init__()
        self.drop, self.causal = drop, causal

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, noise: Noise | None) -> Tensor:
        queries = q_BHTK.shape[1] // k_BGTK.shape[1]
        k_BHTK, v_BHTK = k_BGTK, v_BGTK
        if queries > 1:
            k_BHTK, v_BHTK = (t.repeat_interleave(queries, dim=1) for t in (k_BGTK, v_BGTK))
        if noise is None or not self.drop.drops(noise):
            if noise is None or noise.documents is None:
                return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=self.causal)
            seen = ~self.unseen(q_BHTK, noise)
            return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=seen)
        # the fused kernels draw their own mask, which would depend on the layout
        return self.attend(q_BHTK, k_BHTK, v_BHTK, noise)

    def attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, noise: Noise) -> Tensor:
        """With dropout of the attention weights, by the noise of samples, heads and positions."""
        score_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
        weight_BHTT = score_BHTT.masked_fill(self.unseen(q_BHTK, noise), float("-inf")).softmax(-1)
        return self.drop(weight_BHTT, noise).to(v_BHTK.dtype) @ v_BHTK

    def unseen(self, q_BHTK: Tensor, noise: Noise) -> Tensor:
        """bool [T, T], or [B, 1, T, T] where samples differ: the keys that a query does not see."""
        T = q_BHTK.shape[-2]
        later_TT = torch.full((T, T), self.causal, device=q_BHTK.device).triu(1)
        every = slice(None)
        return later_TT if noise.documents is None else later_TT | noise.documents.apart(every, every)


class Attention(nn.Module):
    """Self-attention. Rows of `qkv` are grouped by key/value head: its queries, its key, its value, so that a
    contiguous slice of rows is a set of whole heads. counts: of each key/value head here, how many of its queries are
    here."""

    def __init__(self, config: GPTConfig, causal: bool = True) -> None:
        super().__init__()
        self.width = config.d_model // config.n_head
        self.counts = (config.n_head // config.kv_heads,) * config.kv_heads
        self.turn = Rotary(config.rope_theta) if config.positions == "rotary" else Unturned()
        rows = (config.n_head + 2 * config.kv_heads) * self.width
        self.qkv = nn.Linear(config.d_model, rows, bias=config.bias)
        self.drop = Dropout(
            config.dropout
        )  # by this name its masks are drawn, whatever stands in the core's place
        self.core = Core(self.drop, causal)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        qkv = self.qkv(x_BTD)
        B, T, _ = qkv.shape  # not x's T: under sequence parallelism qkv gathers the positions
        q_BHTK, k_BGTK, v_BGTK = self.apart(qkv.view(B, T, -1, self.width))
        y_BHTK = self.core(self.turn(q_BHTK, noise), self.turn(k_BGTK, noise), v_BGTK, noise)
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, -1))

    def apart(self, qkv_BTRK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values. Where keys have unequal numbers of queries, each query gets a copy of its own."""
        if len(set(self.counts)) == 1:
            qkv_BTGQK = qkv_BTRK.unflatten(2, (-1, self.counts[0] + 2))
            q_BTHK, (k_BTGK, v_BTGK) = qkv_BTGQK[..., :-2, :].flatten(2, 3), qkv_BTGQK[..., -2:, :].unbind(3)
        else:
            parts = qkv_BTRK.split([rows for count in self.counts for rows in (count, 1, 1)], dim=2)
            q_BTHK = torch.cat(parts[::3], 2)
            k_BTGK, v_BTGK = (
                torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(of, self.counts, strict=True)], 2)
                for of in (parts[1::3], parts[2::3])
            )
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers with GELU, or three with a SiLU gate (SwiGLU, Shazeer, 2020)."""

    def __init__(self, config: GPTConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ff_width
        self.up = nn.Linear(config.d_model, width, bias=config.bias)
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.d_model, width, bias=config.bias) if gated else None
        self.down = nn.Linear(width, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTD)))
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attn = Attention(config)
        self.drop1 = Dropout(config.dropout)
        self.norm2 = _norm(config)
        self.mlp = FeedForward(config)
        self.drop2 = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, noise: Noise | None = None) -> Tensor:
        x_BTD = x_BTD + self.drop1(self.attn(self.norm1(x_BTD), noise), noise)
        return x_BTD + self.drop2(self.mlp(self.norm2(x_BTD)), noise)


class Head(nn.Module):
    """Residual stream [B, T, D] → logits [B, T, V]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.out = nn.Linear(config.d_model, config.vocab or 0, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(self.norm(x_BTD))


class GPT(Chain):
    """Stem, blocks, head; `forward(tokens [B, T] int64, noise) → logits [B, T, V]`."""

    def __init__(self, config: GPTConfig, blocks: Iterable[nn.Module] | None = None) -> None:
        """blocks: in the place of dense ones."""
        stem, head = Stem(config), Head(config)
        stack = nn.ModuleList(blocks or (Block(config) for _ in range(config.n_layer)))
        super().__init__(stem, stack, head, anatomy_of(config))
        self.config = config
        if config.tie_embeddings:
            head.out.weight = stem.tok.weight

    def initial_rules(self) -> Mapping[str, Rule]:
        """GPT-2's and Llama's: normal with std 0.02, residual projections divided by sqrt(2 · layers), no bias."""
        rules: dict[str, Rule] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                rules[name] = ("zeros" if name.endswith("bias") else "ones", 0.0)
            elif name.endswith(("attn.proj.weight", "mlp.down.weight")):
                rules[name] = ("normal", 0.02 / math.sqrt(2 * self.config.n_layer))
            else:
                rules[name] = ("normal", 0.02)
        return rules


def anatomy_of(config: GPTConfig) -> Anatomy:
    heads = Units(config.n_head, config.d_model // config.n_head)
    grouped = replace(heads, group=config.n_head // config.kv_heads)
    return Anatomy(
        cross_entropy=True,
        splits={
            "stem.tok": Split.VOCAB_IN,
            "stem.pos": Split.POSITIONS,
            "stem.drop": Split.SEQUENCE_DROPOUT,
            "blocks.*.attn": Split.HEADS,
            "blocks.*.attn.qkv": Split.COLUMN,
            "blocks.*.attn.turn": Split.ROTARY,
            "blocks.*.attn.core": Split.CORE,
            "blocks.*.attn.drop": Split.HEAD_DROPOUT,
            "blocks.*.attn.proj": Split.ROW,
            "blocks.*.mlp.up": Split.COLUMN,
            "blocks.*.mlp.gate": Split.COLUMN,
            "blocks.*.mlp.down": Split.ROW,
            "blocks.*.drop1": Split.SEQUENCE_DROPOUT,
            "blocks.*.drop2": Split.SEQUENCE_DROPOUT,
            "head.out": Split.VOCAB_OUT,
        },
        divides={"heads": config.n_head, "key/value heads": config.kv_heads, "hidden width": config.ff_width},
        units={
            "blocks.*.attn": grouped,
            "blocks.*.attn.qkv": grouped,
            "blocks.*.attn.drop": Units(config.n_head),
            "blocks.*.attn.proj": heads,
        },
        ties=(("head.out.weight", "stem.tok.weight"),) if config.tie_embeddings else (),
        sequence=config.context,
        again=("blocks.*.attn.core",),
    )

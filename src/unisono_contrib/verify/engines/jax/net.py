"""The GPT of a recipe in JAX, as one device of a mesh computes it: sums between devices stand where they happen.

The code runs inside `shard_map` over the axes dp, shard and tp, each of one device or more. `tp` is Megatron's (Shoeybi
et al., 2019) with sequence parallelism (Korthikanti et al., 2022): between layers each device holds some positions.

Shapes: B samples, T positions, t those of one device, D width, G key/value heads here, Q queries of each, K head width,
V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax import lax  # pyright: ignore[reportMissingImports]
from jax.scipy.special import erf  # pyright: ignore[reportMissingImports]

Array: TypeAlias = Any  # a jax.Array; types are checked where jax is not installed
Weights = Mapping[str, Any]

EPS = 1e-5  # of norms


@dataclass(frozen=True, slots=True)
class JaxSizes:
    """The settings that say what is computed, by their names in `[model]`, and how many devices share a layer."""

    n_layer: int
    n_head: int
    kv_heads: int
    d_model: int
    vocab: int
    positions: str
    activation: str
    norm: str
    tie_embeddings: bool
    tp: int

    @property
    def each(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_head

    @property
    def cuts_vocab(self) -> bool:
        """Whether tp cuts the vocabulary; where it does not divide it, each device has the logits of its positions."""
        return self.vocab % self.tp == 0

    def cut_dim(self, name: str) -> int | None:
        """The dim of a weight that tp cuts."""
        if name in ("stem.tok.weight", "head.out.weight"):
            return 0 if self.cuts_vocab else None
        layer, _, kind = name.rpartition(".")
        if layer.endswith(("attn.qkv", "mlp.up", "mlp.gate")):
            return 0
        return 1 if layer.endswith(("attn.proj", "mlp.down")) and kind == "weight" else None


@dataclass(frozen=True, slots=True)
class StagePart:
    """Some consecutive blocks, with the stem where they are the first and the head where they are the last."""

    sizes: JaxSizes
    blocks: range
    first: bool
    last: bool

    def names(self, all_names: Sequence[str]) -> list[str]:
        """Of all weights those that it needs; the embedding twice where it is the classifier too."""
        begins = [f"blocks.{i}." for i in self.blocks]
        begins += ["stem."] if self.first else []
        begins += ["head."] if self.last else []
        begins += ["stem.tok."] if self.last and self.sizes.tie_embeddings else []
        return [name for name in all_names if name.startswith(tuple(begins))]

    def forward(self, w: Weights, x: Array, turns: tuple[Array, Array]) -> Array:
        """Tokens [B, T], or what the part before made [B, t, D] → what the next part is given, [B, t, D]."""
        x_BtD = self._stem(w, x) if self.first else x
        for i in self.blocks:
            x_BtD = self._block(w, f"blocks.{i}", x_BtD, turns)
        return x_BtD

    def loss(self, w: Weights, x_BtD: Array, targets_BT: Array, weight: float) -> Array:
        """Cross-entropies of this device's samples, summed, times `weight`; the same on all devices of tp."""
        table = w["stem.tok.weight" if self.sizes.tie_embeddings else "head.out.weight"]
        h = self._norm(w, "head.norm", x_BtD)
        if not self.sizes.cuts_vocab:
            logits, targets = h @ table.T, self._positions_here(targets_BT, h.shape[1])
            picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
            return weight * lax.psum((jax.nn.logsumexp(logits, -1) - picked).sum(), "tp")
        logits_BTV = _gathered(h) @ table.T
        top = lax.pmax(lax.stop_gradient(logits_BTV).max(-1), "tp")
        total = lax.psum(jnp.exp(logits_BTV - top[..., None]).sum(-1), "tp")
        at = targets_BT - lax.axis_index("tp") * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        picked = jnp.take_along_axis(logits_BTV, jnp.where(here, at, 0)[..., None], -1)[..., 0]
        return weight * (jnp.log(total) + top - lax.psum(jnp.where(here, picked, 0.0), "tp")).sum()

    def _positions_here(self, x_BT: Array, size: int) -> Array:
        """Of all positions those of this device."""
        return lax.dynamic_slice_in_dim(x_BT, lax.axis_index("tp") * size, size, 1)

    def _stem(self, w: Weights, tokens_BT: Array) -> Array:
        table, each = w["stem.tok.weight"], tokens_BT.shape[1] // self.sizes.tp
        if self.sizes.cuts_vocab:
            at = tokens_BT - lax.axis_index("tp") * table.shape[0]
            here = (at >= 0) & (at < table.shape[0])
            x_BTD = jnp.where(here[..., None], table[jnp.where(here, at, 0)], 0.0)
            x_BtD = _scattered(x_BTD)
        else:
            x_BtD = table[self._positions_here(tokens_BT, each)]
        if self.sizes.positions == "learned":
            x_BtD += lax.dynamic_slice_in_dim(w["stem.pos.weight"], lax.axis_index("tp") * each, each, 0)
        return x_BtD

    def _block(self, w: Weights, name: str, x_BtD: Array, turns: tuple[Array, Array]) -> Array:
        x_BtD += self._attention(w, f"{name}.attn", self._norm(w, f"{name}.norm1", x_BtD), turns)
        h_BTD, mlp = _gathered(self._norm(w, f"{name}.norm2", x_BtD)), f"{name}.mlp"
        up = _linear(w, f"{mlp}.up", h_BTD)
        if self.sizes.activation == "gelu":
            hidden = up * (1 + erf(up / math.sqrt(2))) / 2
        else:
            hidden = jax.nn.silu(_linear(w, f"{mlp}.gate", h_BTD)) * up
        return x_BtD + _summed(w, f"{mlp}.down", hidden)

    def _norm(self, w: Weights, name: str, x: Array) -> Array:
        if self.sizes.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def _attention(self, w: Weights, name: str, x_BtD: Array, turns: tuple[Array, Array]) -> Array:
        s = self.sizes
        G, Q = s.kv_heads // s.tp, s.n_head // s.kv_heads
        qkv = _linear(w, f"{name}.qkv", _gathered(x_BtD))
        B, T, _ = qkv.shape
        parts = qkv.reshape(B, T, G, Q + 2, s.each)
        q, k, v = parts[..., :Q, :], parts[..., Q, :], parts[..., Q + 1, :]
        if s.positions == "rotary":
            cos, sin = turns
            q = _turned(q, cos[:T, None, None], sin[:T, None, None])
            k = _turned(k, cos[:T, None], sin[:T, None])
        score = jnp.einsum("BtGQK,BTGK->BGQtT", q, k) / math.sqrt(s.each)
        score = jnp.where(jnp.tri(T, dtype=bool), score, -jnp.inf)
        y = jnp.einsum("BGQtT,BTGK->BtGQK", jax.nn.softmax(score, -1), v)
        return _summed(w, f"{name}.proj", y.reshape(B, T, -1))


def _linear(w: Weights, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _summed(w: Weights, name: str, x_BTF: Array) -> Array:
    """A layer whose inputs tp cuts: its sum over devices, of which each keeps its positions."""
    y_BtD = _scattered(x_BTF @ w[f"{name}.weight"].T)
    return y_BtD + w[f"{name}.bias"] if f"{name}.bias" in w else y_BtD


def _gathered(x_BtD: Array) -> Array:
    return lax.all_gather(x_BtD, "tp", axis=1, tiled=True)


def _scattered(x_BTD: Array) -> Array:
    return lax.psum_scatter(x_BTD, "tp", scatter_dimension=1, tiled=True)


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    """Pairs (j, j + K/2) turned by the angles of their positions (Su et al., 2021)."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

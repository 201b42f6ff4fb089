"""The byte GPT, forward and backward by hand, in NumPy and float64: it shares no line with torch, nor with our model.

Each layer returns what it computes and a function that takes the gradient of that back to its input, adding on the
way to the gradients of its weights. The formulas are GPT-2's (Radford et al., 2019) and Llama's (Touvron et al., 2023),
by the settings of the recipe.

Shapes: B samples, T positions, D width, H query heads, G key/value heads, K head width, F hidden width, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Back = Callable[[Array], Array]  # the gradient of what a layer computed → that of its input

EPS = 1e-5  # of norms
_ROWS = 8  # samples computed at a time
_erf = np.vectorize(math.erf, otypes=[float])


@dataclass(frozen=True, slots=True)
class NumpySizes:
    """The settings that say what is computed, by their names in `[model]`."""

    n_layer: int
    n_head: int
    kv_heads: int
    d_model: int
    positions: str
    activation: str
    norm: str
    tie_embeddings: bool

    @property
    def each(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_head


@dataclass(slots=True)
class NumpyGPT:
    """One forward and backward. weights, grads: by the names that they have in a checkpoint. cos, sin: [T, K/2], the
    model's constants for rotary positions."""

    sizes: NumpySizes
    weights: Mapping[str, Array]
    grads: dict[str, Array]
    cos: Array
    sin: Array

    def loss(self, tokens_BT: Array, targets_BT: Array, weight: float) -> float:
        """The sum of all targets' cross-entropies times `weight`, in nats; its gradients are added to `grads`."""
        x, backs = self._stem(tokens_BT)
        for i in range(self.sizes.n_layer):
            x, back = self._block(f"blocks.{i}", x)
            backs.append(back)
        x, back = self._norm("head.norm", x)
        backs.append(back)
        out = "stem.tok" if self.sizes.tie_embeddings else "head.out"
        logits, back = self._linear(out, x, "head.out.bias")
        backs.append(back)
        value, g = _cross_entropy(logits, targets_BT)
        g *= weight
        for back in reversed(backs):
            g = back(g)
        return value * weight

    def _add(self, name: str, grad: Array) -> None:
        self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def _stem(self, tokens_BT: Array) -> tuple[Array, list[Back]]:
        table_VD = self.weights["stem.tok.weight"]
        x_BTD, T = table_VD[tokens_BT], tokens_BT.shape[1]
        learned = self.sizes.positions == "learned"
        if learned:
            x_BTD = x_BTD + self.weights["stem.pos.weight"][:T]

        def back(g_BTD: Array) -> Array:
            if learned:
                rows = np.zeros_like(self.weights["stem.pos.weight"])
                rows[:T] = g_BTD.sum(0)
                self._add("stem.pos.weight", rows)
            rows = np.zeros_like(table_VD)
            np.add.at(rows, tokens_BT, g_BTD)
            self._add("stem.tok.weight", rows)
            return g_BTD

        return x_BTD, [back]

    def _block(self, name: str, x: Array) -> tuple[Array, Back]:
        n1, back_n1 = self._norm(f"{name}.norm1", x)
        a, back_a = self._attention(f"{name}.attn", n1)
        mid = x + a
        n2, back_n2 = self._norm(f"{name}.norm2", mid)
        m, back_m = self._mlp(f"{name}.mlp", n2)

        def back(g: Array) -> Array:
            g = g + back_n2(back_m(g))
            return g + back_n1(back_a(g))

        return mid + m, back

    def _linear(self, name: str, x: Array, bias: str = "") -> tuple[Array, Back]:
        w, bias = self.weights[f"{name}.weight"], bias or f"{name}.bias"
        y = x @ w.T
        if bias in self.weights:
            y = y + self.weights[bias]

        def back(g: Array) -> Array:
            flat = g.reshape(-1, g.shape[-1])
            self._add(f"{name}.weight", flat.T @ x.reshape(-1, x.shape[-1]))
            if bias in self.weights:
                self._add(bias, flat.sum(0))
            return g @ w

        return y, back

    def _norm(self, name: str, x: Array) -> tuple[Array, Back]:
        w, bias = self.weights[f"{name}.weight"], f"{name}.bias"
        centred = self.sizes.norm == "layer"
        c = x - x.mean(-1, keepdims=True) if centred else x
        scale = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + EPS)
        n = c * scale
        y = n * w + self.weights[bias] if bias in self.weights else n * w

        def back(g: Array) -> Array:
            self._add(f"{name}.weight", (g * n).reshape(-1, n.shape[-1]).sum(0))
            if bias in self.weights:
                self._add(bias, g.reshape(-1, g.shape[-1]).sum(0))
            d = g * w
            d = (d - n * (d * n).mean(-1, keepdims=True)) * scale
            return d - d.mean(-1, keepdims=True) if centred else d

        return y, back

    def _attention(self, name: str, x: Array) -> tuple[Array, Back]:
        """Rows of qkv: for each key/value head its queries, its key, its value."""
        s = self.sizes
        B, T, D = x.shape
        G, Q, K = s.kv_heads, s.n_head // s.kv_heads, s.each
        qkv, back_qkv = self._linear(f"{name}.qkv", x)
        parts = qkv.reshape(B, T, G, Q + 2, K).transpose(0, 2, 3, 1, 4)  # B G Q+2 T K
        q, k, v = parts[:, :, :Q], parts[:, :, Q : Q + 1], parts[:, :, Q + 1 :]
        if s.positions == "rotary":
            q, k = self._turned(q, 1), self._turned(k, 1)
        score = q @ k.swapaxes(-1, -2) / math.sqrt(K)
        score = np.where(np.triu(np.ones((T, T), bool), 1), -np.inf, score)
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y, back_proj = self._linear(f"{name}.proj", (p @ v).transpose(0, 3, 1, 2, 4).reshape(B, T, D))

        def back(g: Array) -> Array:
            o = back_proj(g).reshape(B, T, G, Q, K).transpose(0, 2, 3, 1, 4)
            dv = (p.swapaxes(-1, -2) @ o).sum(2, keepdims=True)
            dp = o @ v.swapaxes(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(K)
            dq, dk = ds @ k, (ds.swapaxes(-1, -2) @ q).sum(2, keepdims=True)
            if s.positions == "rotary":
                dq, dk = self._turned(dq, -1), self._turned(dk, -1)
            d = np.concatenate((dq, dk, dv), axis=2).transpose(0, 3, 1, 2, 4)
            return back_qkv(d.reshape(B, T, -1))

        return y, back

    def _turned(self, x: Array, way: int) -> Array:
        """Pairs (j, j + K/2) turned by the angles of their positions, way: 1, or -1 back."""
        T, half = x.shape[-2], x.shape[-1] // 2
        cos, sin = self.cos[:T], self.sin[:T] * way
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def _mlp(self, name: str, x: Array) -> tuple[Array, Back]:
        up, back_up = self._linear(f"{name}.up", x)
        if self.sizes.activation == "gelu":
            below = (1 + _erf(up / math.sqrt(2))) / 2  # of a normal number's probability
            y, back_down = self._linear(f"{name}.down", up * below)
            slope = below + up * np.exp(-up * up / 2) / math.sqrt(2 * math.pi)
            return y, lambda g: back_up(back_down(g) * slope)
        gate, back_gate = self._linear(f"{name}.gate", x)
        s = 1 / (1 + np.exp(-gate))
        y, back_down = self._linear(f"{name}.down", gate * s * up)

        def back(g: Array) -> Array:
            h = back_down(g)
            return back_gate(h * up * s * (1 + gate * (1 - s))) + back_up(h * gate * s)

        return y, back


def _cross_entropy(logits_BTV: Array, targets_BT: Array) -> tuple[float, Array]:
    """(sum over targets, its gradient)."""
    top = logits_BTV.max(-1, keepdims=True)
    e = np.exp(logits_BTV - top)
    total = e.sum(-1, keepdims=True)
    chosen = np.take_along_axis(logits_BTV, targets_BT[..., None], -1)
    value = float((np.log(total) + top - chosen).sum())
    g = e / total
    np.put_along_axis(g, targets_BT[..., None], np.take_along_axis(g, targets_BT[..., None], -1) - 1, -1)
    return value, g


def turns(context: int, each: int, theta: float) -> tuple[Array, Array]:
    """The cosines and sines of rotary positions (Su et al., 2021), [T, K/2], without a model's rounding to float32."""
    angle = np.arange(context)[:, None] * theta ** (-np.arange(each // 2) / (each // 2))
    return np.cos(angle), np.sin(angle)


def loss_and_grads(
    sizes: NumpySizes,
    weights: Mapping[str, Array],
    tokens_NT: Array,
    targets_NT: Array,
    cos: Array,
    sin: Array,
) -> tuple[float, dict[str, Array]]:
    """Mean loss over all targets of a global batch, in nats, and the gradient of each weight, float64."""
    net, total = NumpyGPT(sizes, weights, {}, cos, sin), 0.0
    for at in range(0, len(tokens_NT), _ROWS):
        rows = slice(at, at + _ROWS)
        total += net.loss(tokens_NT[rows], targets_NT[rows], 1 / targets_NT.size)
    return total, net.grads

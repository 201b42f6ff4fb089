"""A decoder-only transformer: GPT-2's (Radford et al., 2019) or Llama's (Touvron et al., 2023), by its settings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from unisono.spec.errors import Problem, UsageError
from unisono.spec.model import DealtSize, Facts, ModelConfig
from unisono.spec.training import Count, Depth, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.models.hf.names import Layout

_HEADS = 1024  # the most that a message proposes
# What each layout of transformers means in our settings. Both can have biases or none, tied weights or not.
_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"positions": "learned", "norm": "layer", "activation": "gelu"},
    "llama": {"positions": "rotary", "norm": "rms", "activation": "swiglu"},
}


class GPTConfig(ModelConfig):
    """Transformer blocks over tokens; the defaults are GPT-2's settings, the other choices Llama's."""

    name: ClassVar[str] = "gpt"
    reads: ClassVar[str] = "tokens"
    attends: ClassVar[bool] = True
    grids: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    kind: Literal["gpt"] = Field(default="gpt", description="gpt")
    n_layer: Depth = Field(
        default=4, description="blocks (gpt: transformer blocks, convnet: residual blocks)"
    )
    n_head: Count = Field(default=4, description="attention heads")
    n_kv_head: Count | None = Field(default=None, description="key-value heads; as many as heads when absent")
    d_model: Count = Field(default=128, description="width of the residual stream")
    d_ff: Count | None = Field(
        default=None, description="feed-forward width; 4 d_model, for swiglu 8/3 d_model when absent"
    )
    context: Count = Field(default=64, description="tokens of a sample")
    vocab: Count | None = Field(default=None, description="size of the vocabulary; from the data when absent")
    dropout: Share = Field(default=0.0, description="probability of dropping an element")
    bias: bool = Field(default=True, description="biases in linear layers and norms")
    tie_embeddings: bool = Field(default=True, description="one weight for the embedding and the classifier")
    positions: Literal["learned", "rotary"] = Field(default="learned", description="how positions enter")
    activation: Literal["gelu", "swiglu"] = Field(default="gelu", description="feed-forward non-linearity")
    norm: Literal["layer", "rms"] = Field(
        default="layer", description="normalisation before attention and feed-forward"
    )
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary frequencies")

    @property
    def kv_heads(self) -> int:
        """Key-value heads as played."""
        return self.n_kv_head or self.n_head

    @property
    def ff_width(self) -> int:
        """Feed-forward width as played.

        Swiglu has three matrices, so 8/3 of the width keeps the size that 4 has with two (Shazeer, 2020).
        """
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.activation == "gelu" else -(-8 * self.d_model // 24) * 8

    @property
    def depth(self) -> int | None:
        return self.n_layer

    def problems(self) -> Iterator[Problem]:
        heads, width = self.n_head, self.d_model
        if width % heads:
            fits = [n for n in range(1, min(width, 4 * heads, _HEADS) + 1) if width % n == 0]
            what = f"n_head {heads} does not divide d_model {width}"
            fix = f"n_head one of {' '.join(map(str, fits))}"
            yield Problem("C06", what, "model.n_head, model.d_model", fix)
        elif self.positions == "rotary" and (width // heads) % 2:
            what = f"rotary positions turn pairs, but a head is {width // heads} wide"
            yield Problem("C06", what, "model.n_head, model.d_model", "an even d_model / n_head")
        if heads % self.kv_heads:
            what = f"n_kv_head {self.kv_heads} does not divide n_head {heads}"
            yield Problem("C06", what, "model.n_kv_head, model.n_head", "a divisor of n_head")

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        heads = DealtSize("the heads", "model.n_head", self.n_head)
        if axis == "cp":
            grouped = DealtSize("the key-value heads", "model.n_kv_head", self.kv_heads)
            positions = DealtSize("the context", "model.context", self.context)
            return positions, heads, *((grouped,) if self.kv_heads != self.n_head else ())
        if axis != "tp":
            return None
        return (
            heads,
            DealtSize("the feed-forward width", "model.d_ff", self.ff_width),
            DealtSize("the context (positions are split between blocks)", "model.context", self.context),
        )

    def with_vocab(self, facts: Facts) -> Self:
        """These settings with the size of the vocabulary. Raises UsageError where nobody knows it."""
        vocab = self.sized(facts).vocab
        if not vocab:
            what = "the size of the vocabulary is not known"
            raise UsageError(what, where="model.vocab", fix="--model.vocab N")
        return self.model_copy(update={"vocab": vocab})

    def build(self, facts: Facts) -> "nn.Module":
        from unisono.models.gpt.net import GPT

        return GPT(self.with_vocab(facts))

    def _misfits(self) -> dict[str, list[str]]:
        """By layout, what of the settings it cannot express."""
        misfits = {
            name: [f'{k} = "{getattr(self, k)}"' for k, value in wanted.items() if getattr(self, k) != value]
            for name, wanted in _LAYOUTS.items()
        }
        if self.kv_heads != self.n_head:
            misfits["gpt2"].append(f"n_kv_head = {self.kv_heads} (of {self.n_head} heads)")
        return misfits

    def fits(self) -> tuple[str, ...]:
        """The layouts of transformers that can express these settings."""
        return tuple(name for name, wrong in self._misfits().items() if not wrong)

    def layout(self) -> str:
        for name in self.fits():
            return name
        misfits = self._misfits()
        raise UsageError(
            "these settings fit neither GPT-2's nor Llama's layout",
            code="F01",
            where="model",
            likely="; ".join(f"not {name} because of {', '.join(wrong)}" for name, wrong in misfits.items()),
            fix="for GPT-2: learned positions, norm layer, gelu; for Llama: rotary, norm rms, swiglu",
        )

    def layouts(self, shapes: Mapping[str, tuple[int, ...]]) -> "Mapping[str, Layout]":
        from unisono.models.gpt.layouts import layouts_of

        return layouts_of(self, shapes)

    def export(self, state: "Mapping[str, Tensor]", out: Path, tokenizer: str | None) -> dict[str, Any]:
        from unisono.models.gpt.export import export_state

        return export_state(state, self, out, tokenizer=tokenizer)

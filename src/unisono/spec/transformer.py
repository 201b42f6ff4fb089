"""A decoder-only transformer in numbers, dealt by tensor and context parallelism: what one rank keeps and counts.

Parameters are those of `workload.gpt`. Bytes kept for the backward pass follow the list of tensors of Korthikanti et
al., "Reducing activation recomputation in large transformer models", 2022, section 4, generalised to gated
feed-forwards, grouped key-value heads, no dropout and fused attention.
"""

from dataclasses import dataclass
from functools import cached_property

from unisono.spec.workload import Sizes, Workload, gpt


@dataclass(frozen=True)
class Transformer:
    """Sizes of the model; `kv_heads` and `d_ff` as played, `noisy` with dropout, `learned` positions in a table."""

    n_layer: int
    n_head: int
    d_model: int
    context: int
    vocab: int
    kv_heads: int
    d_ff: int
    noisy: bool = False
    bias: bool = True
    tied: bool = True
    learned: bool = True
    gated: bool = False
    rms: bool = False

    @cached_property
    def workload(self) -> Workload:
        """The same model as parts."""
        return gpt(
            n_layer=self.n_layer, n_head=self.n_head, d_model=self.d_model, context=self.context, vocab=self.vocab,
            kv_heads=self.kv_heads, d_ff=self.d_ff, dropout=0.1 if self.noisy else 0.0, bias=self.bias,
            tie_embeddings=self.tied, learned_positions=self.learned, gated=self.gated, rms=self.rms,
        )  # fmt: skip

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_head

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys, or of its values."""
        return self.kv_heads * self.head_width

    @cached_property
    def block_parameters(self) -> tuple[int, int]:
        """Elements of one block that `tp` deals out, and elements that each of its ranks keeps whole."""
        norm = self.d_model * (2 if self.bias and not self.rms else 1)
        whole = 2 * norm + (2 * self.d_model if self.bias else 0)  # norms, biases of row-wise products
        every = self.workload.blocks[0].parameters if self.n_layer else whole
        return every - whole, whole

    @cached_property
    def stem_parameters(self) -> tuple[int, int]:
        """The embedding: dealt by vocabulary, positions whole."""
        return self.vocab * self.d_model, self.context * self.d_model if self.learned else 0

    @cached_property
    def head_parameters(self) -> tuple[int, int]:
        """The classifier (also where it is tied: the last stage needs a copy of its own), and the last norm."""
        return self.vocab * self.d_model, self.workload.parts[-1].parameters - self.vocab * self.d_model

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples, attention in full: what MFU is counted in."""
        return float(batch) * self.workload.step_flops


def transformer(model: Sizes, vocab: int) -> Transformer:
    """The numbers of a recipe's `[model]` of kind gpt. Raises ValueError for another kind."""
    if model.kind != "gpt":
        raise ValueError(f"a model of kind {model.kind!r} is no transformer")
    return Transformer(
        n_layer=model.n_layer, n_head=model.n_head, d_model=model.d_model, context=model.context, vocab=vocab,
        kv_heads=model.kv_heads, d_ff=model.ff_width, noisy=model.dropout > 0.0, bias=model.bias,
        tied=model.tie_embeddings, learned=model.positions == "learned", gated=model.activation == "swiglu",
        rms=model.norm == "rms",
    )  # fmt: skip


def block_bytes(
    model: Transformer,
    *,
    micro_batch: int,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = True,
    fused: bool = True,
    recompute: str = "none",
    itemsize: int = 2,
) -> float:
    """Bytes that one block of one micro-batch keeps on one rank for the backward pass.

    fused: attention that never writes its scores (Dao et al., 2022). recompute: none; selective, which computes the
    scores again; full, which keeps the block's input alone.
    """
    tokens = micro_batch * model.context / cp
    h, e = model.d_model, itemsize
    shared = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * h * e / shared
    # Inputs of both norms and of both first products; dropout's masks are one byte an element.
    whole = 4 * h * e + (2 * h if model.noisy else 0)
    dealt = e * (h + 2 * model.kv_width + h) + e * model.d_ff * (3 if model.gated else 2)
    if fused:
        scores = 4.0 * model.n_head  # one fp32 logarithm a row
    elif recompute == "selective":
        scores = 0.0
    else:
        # After softmax, after dropout, and the mask between.
        scores = model.n_head * model.context * (e + (e + 1 if model.noisy else 0))
    return tokens * (whole / shared + (dealt + scores) / tp)


def live_bytes(
    model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, sequence_parallel: bool = True,
    fused: bool = True, itemsize: int = 2,
) -> float:  # fmt: skip
    """Bytes of the one block that is being computed again under recompute=full."""
    return block_bytes(
        model, micro_batch=micro_batch, tp=tp, cp=cp, sequence_parallel=sequence_parallel, fused=fused,
        itemsize=itemsize,
    )  # fmt: skip


def head_bytes(model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 2) -> float:
    """Bytes of the last norm, of the logits and of their fp32 copy in the loss, on the last stage."""
    tokens = micro_batch * model.context / cp
    return tokens * (2 * model.d_model * itemsize / tp + model.vocab * (itemsize + 4) / tp)


def stem_bytes(model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1) -> float:
    """Bytes of the embedding's dropout mask, on the first stage."""
    return micro_batch * model.context / cp * model.d_model / tp if model.noisy else 0.0

"""Sizes of a decoder-only transformer under tensor and context parallelism: elements, FLOPs and kept activations.

Bytes kept for the backward pass follow Korthikanti et al., "Reducing activation recomputation in large transformer
models", 2022, section 4, extended to gated feed-forwards, grouped key-value heads, no dropout and fused attention.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unisono.plan.grid import Grid
from unisono.planner.states import WholeMatrixSteps
from unisono.planner.work.experts import (
    Experts,
    Latent,
    common_elements,
    expert_elements,
    matrices,
    token_products,
)
from unisono.planner.work.sample import Sample, text
from unisono.spec.workload import Workload, WorkPart


@dataclass(frozen=True)
class Transformer:
    """Sizes of the model; `kv_heads` and `d_ff` as played, `noisy` with dropout, `learned` positions in a table.

    experts: of the sparse layers, None where all are dense. latent: attention through latent vectors. head: width of
    one head where it is not d_model / n_head. qkv_bias: biases of queries, keys and values where they are not like the
    others; proj_bias: of attention's last product. head_norms: queries and keys have norms of a head's width. rows: of
    the table of positions where it is longer than the context. states: numbers that the optimiser keeps of each
    parameter, 2 of Adam, 1 of a velocity. steps: of an optimiser whose matrices have owners. apart: queries, keys and
    values are products of their own, as transformers has them, and what tp deals is gathered once before gate and up.
    averages: numbers kept of each parameter beside, as its average over updates.
    lora: rank of the adapters that learn in the place of weights, beside every product of the blocks; 0 where all
    weights learn.
    """

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
    experts: Experts | None = None
    latent: Latent | None = None
    head: int = 0
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    head_norms: bool = False
    rows: int = 0
    states: int = 2
    steps: WholeMatrixSteps | None = None
    apart: bool = False
    lora: int = 0
    averages: int = 0

    @property
    def measured(self) -> bool:
        """Whether prices of such models have been held beside measurements."""
        return self.experts is None and self.latent is None

    @property
    def scales(self) -> dict[str, int]:
        """Sizes by which a request is near to what a stack was fitted to, or far from it."""
        return {"width": self.d_model, "context": self.context}

    def holders(self, ranks: int) -> int:
        """Return the largest degree of ep: the number of experts."""
        return self.experts.count if self.experts else 1

    @property
    def sample(self) -> Sample:
        """Bytes of `context` tokens before anybody computes on them."""
        return text(self.context, self.vocab)

    @cached_property
    def workload(self) -> Workload:
        """Parameters and arithmetic, part by part. What a part keeps for the backward pass is counted by
        `work.activations`."""
        D, T, V = self.d_model, self.context, self.vocab
        norm = D * (2 if self.bias and not self.rms else 1)
        stem = WorkPart("stem", V * D + ((self.rows or T) * D if self.learned else 0), 0, 0, T * D)
        head = WorkPart("head", norm + V * D, 2 * T * D * V, 0, T * V)
        blocks = (self._block(layer, norm) for layer in range(self.n_layer))
        return Workload((stem, *blocks, head), tied=V * D if self.tied else 0)

    def _block(self, layer: int, norm: int) -> WorkPart:
        """Count one block. norm: parameters of a norm of the residual stream."""
        D, T, e = self.d_model, self.context, self.experts
        weights = sum(inner * columns for inner, columns, _, _ in self.attention_products)
        beside = 2 * norm + self._biases + (2 * self.head_width if self.head_norms else 0)
        beside += self.latent.norms if self.latent else 0
        if e is not None and e.sparse(layer):
            options = {"gated": self.gated, "bias": self.bias}
            routed, products = expert_elements(e, D, **options), token_products(e, D, gated=self.gated)
            feed, idle = routed + common_elements(e, D, **options), routed - routed // e.count * e.top_k
        else:
            products, idle = matrices(self.gated) * D * self.d_ff, 0
            feed = products + ((matrices(self.gated) - 1) * self.d_ff + D if self.bias else 0)
        scores = T * self.n_head * sum(self.score_widths)
        flops = 2 * T * (weights + products + scores)
        return WorkPart(f"blocks.{layer}", weights + beside + feed, flops, 0, T * D, idle)

    @property
    def _biases(self) -> int:
        """Number of attention's biases."""
        qkv = self.bias if self.qkv_bias is None else self.qkv_bias
        proj = self.bias if self.proj_bias is None else self.proj_bias
        return (self.qkv_width if qkv else 0) + (self.d_model if proj else 0)

    @cached_property
    def head_width(self) -> int:
        return self.head or self.d_model // self.n_head

    @cached_property
    def kv_width(self) -> int:
        """Elements of one token's keys, or of its values."""
        if self.latent:
            return self.n_head * (self.latent.plain + self.latent.turned + self.latent.value) // 2
        return self.kv_heads * self.head_width

    @cached_property
    def qkv_width(self) -> int:
        """Elements of one token's queries, keys and values."""
        if self.latent:
            return self.n_head * (2 * (self.latent.plain + self.latent.turned) + self.latent.value)
        return self.n_head * self.head_width + 2 * self.kv_width

    @cached_property
    def score_widths(self) -> tuple[int, int]:
        """Widths of one head: of queries and keys, and of values."""
        if self.latent:
            return self.latent.plain + self.latent.turned, self.latent.value
        return self.head_width, self.head_width

    @cached_property
    def attended(self) -> int:
        """Elements of one token that attention takes and gives: queries, keys, values, result."""
        return self.qkv_width + self.n_head * self.score_widths[1]

    @cached_property
    def attention_products(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """(inner, columns, whether tp splits the inner, the columns) of attention's products with weights."""
        if self.latent:
            return self.latent.products(self.d_model, self.n_head)
        wide = self.n_head * self.head_width
        return (self.d_model, self.qkv_width, False, True), (wide, self.d_model, True, False)

    @cached_property
    def sparse_share(self) -> float:
        """Share of blocks that have experts."""
        if self.experts is None or not self.n_layer:
            return 0.0
        return self.experts.layers(0, self.n_layer) / self.n_layer

    @property
    def dense_share(self) -> float:
        """Share of blocks with a feed-forward layer that every token takes; shared experts count."""
        return 1.0 - (self.sparse_share if self.experts and not self.experts.shared_width else 0.0)

    @cached_property
    def layer_experts(self) -> float:
        """Elements of one layer's routed experts, which `ep` splits."""
        if self.experts is None:
            return 0.0
        return expert_elements(self.experts, self.d_model, gated=self.gated, bias=self.bias)

    @cached_property
    def block_parameters(self) -> tuple[float, float]:
        """(elements of a block that `tp` splits, elements that each rank keeps whole). Routed experts are not
        counted; of dense and sparse blocks it is the mean."""
        norm = self.d_model * (2 if self.bias and not self.rms else 1)
        # norms, biases of row-wise products: of experts there is none
        rows = 1 + self.dense_share
        whole = 2 * norm + (rows * self.d_model if self.bias else 0)
        whole += 2 * self.head_width if self.head_norms else 0
        if not self.n_layer:
            return 0, whole
        if self.experts is None:
            return self.workload.blocks[0].parameters - whole, whole
        every = sum(part.parameters for part in self.workload.blocks) / self.n_layer
        router = self.sparse_share * self.experts.count * self.d_model
        return every - self.sparse_share * self.layer_experts - whole - router, whole + router

    @cached_property
    def stem_parameters(self) -> tuple[int, int]:
        """(elements of the embedding, which tp splits by vocabulary, elements of the positions, which are whole)."""
        return self.vocab * self.d_model, (self.rows or self.context) * self.d_model if self.learned else 0

    def matrices(self, tp: int) -> tuple[list[tuple[float, float]], float]:
        """Return (rows and columns of a block's matrices under tp, elements of a block on one rank)."""
        h, ff = self.d_model, self.d_ff
        shapes = [
            (h, (h + 2 * self.kv_width) / tp),
            (h / tp, h),
            *[(h, ff / tp)] * (2 if self.gated else 1),
            (ff / tp, h),
        ]
        dealt, kept = self.block_parameters
        return shapes, dealt / tp + kept

    @cached_property
    def learns(self) -> float:
        """Share of elements that have a gradient and optimiser states."""
        if not self.lora:
            return 1.0
        products, _ = self.matrices(1)
        adapters = self.n_layer * self.lora * sum(inner + columns for inner, columns in products)
        return adapters / sum(part.parameters for part in self.workload.parts)

    @property
    def tied_elements(self) -> int:
        """Elements of a trainable weight that both ends have."""
        return self.stem_parameters[0] if self.tied and not self.lora else 0

    @cached_property
    def head_parameters(self) -> tuple[int, int]:
        """The classifier (also where it is tied: the last stage needs a copy of its own), and the last norm."""
        return self.vocab * self.d_model, self.workload.parts[-1].parameters - self.vocab * self.d_model

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples, attention in full: what MFU is counted in. Weights that do
        not learn have no products towards their gradients."""
        whole, attention = float(batch) * self.workload.step_flops, self.attention_flops(batch)
        return attention + (whole - attention) * 2.0 / 3.0 if self.lora else whole

    def attention_flops(self, batch: int) -> float:
        """Return the FLOPs of a step between activations: scores, and weighted values."""
        each = 2.0 * self.context**2 * self.n_head * sum(self.score_widths)
        return 3.0 * batch * self.n_layer * each


def transformer(model: Any, vocab: int) -> Transformer:
    """The numbers of a recipe's `[model]` whose kind attends, with its experts if it has any."""
    experts = None
    if model.deals("ep"):
        width = model.d_expert or model.ff_width
        experts = Experts(
            count=model.n_experts, top_k=model.top_k, width=width, shared_width=model.n_shared_experts * width,
            capacity=model.capacity_factor, load=model.load_factor, every=model.moe_every, dense=model.n_dense_first,
            weighed=model.aux_loss > 0.0, choosing=model.router == "expert_choice",
        )  # fmt: skip
    return Transformer(
        n_layer=model.n_layer, n_head=model.n_head, d_model=model.d_model, context=model.context, vocab=vocab,
        kv_heads=model.kv_heads, d_ff=model.ff_width, noisy=model.dropout > 0.0, bias=model.bias,
        tied=model.tie_embeddings, learned=model.positions == "learned", gated=model.activation == "swiglu",
        rms=model.norm == "rms", experts=experts,
    )  # fmt: skip


def crossings(
    model: Transformer, tokens: float, itemsize: float, backward: bool = False, again: bool = False
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((bytes, times) of what one block of ours gathers on tp in a forward pass, of what it scatters); backwards what
    is scattered, of what is gathered.

    tokens: of a micro-batch. itemsize: of what products compute with; gradients of what norms give are summed in fp32.
    again: in a pass that is computed again, up to the last tensor that is kept: without dropout before the second half
    scatters.
    """
    whole = tokens * model.d_model
    # queries, keys and values; gate and up, each its own
    gathers = 1.0 + (1 if model.apart else matrices(model.gated) - 1) * model.dense_share
    wide = max(4, itemsize) if backward else itemsize
    scatters = 1.0 + model.dense_share
    return (whole * wide, gathers), (whole * itemsize, 1.0 if again and not model.noisy else scatters)


def on_rank(tp: int, dealt: float, whole: float) -> float:
    """Return elements on one rank of tp. `dealt` elements are divided, `whole` ones are not; in a grid both are."""
    return (dealt + whole) / tp if isinstance(tp, Grid) else dealt / tp + whole

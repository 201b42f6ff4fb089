"""Seconds of one transformer block, forward and backward, on one rank; and of stem and head.

Bytes of elementwise kernels are counted as the usual fused kernels read and write them: norm; bias, dropout and
residual; activation; and, where attention is not fused, scale, mask and softmax, and dropout of the scores.
"""

from dataclasses import dataclass
from typing import Annotated

from unisono.planner.collectives import Bus
from unisono.planner.kernels import Chip, elementwise, matmul, soft_max
from unisono.planner.stack import Stack
from unisono.spec.cluster import Source
from unisono.spec.transformer import Transformer

_COUNTED = Source(
    "specification", "kernels of PyTorch's eager mode with Megatron's fused norms and softmax, counted"
)
# Kernels that the host starts for one block.
FORWARD_LAUNCHES: Annotated[int, _COUNTED] = 20
BACKWARD_LAUNCHES: Annotated[int, _COUNTED] = 32
UNFUSED_LAUNCHES: Annotated[int, _COUNTED] = 4
# Products of the fused backward pass of attention for one of the forward pass: it computes the scores again.
FUSED_BACKWARD: Annotated[float, Source("specification", "five products for two; Dao et al., 2022")] = 2.5


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass over one block. arithmetic: matrix products alone. device: all kernels. exposed, hidden: of
    tp's and cp's collectives. host: to start it all. total: what the clock shows."""

    arithmetic: float = 0.0
    device: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    host: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds of the device, with what it waits for the network."""
        return self.device + self.exposed

    @property
    def total(self) -> float:
        return soft_max(self.busy, self.host)

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.arithmetic + other.arithmetic,
            self.device + other.device,
            self.exposed + other.exposed,
            self.hidden + other.hidden,
            self.host + other.host,
        )


@dataclass(frozen=True, slots=True)
class Dealt:
    """How one block is dealt: tensor and context ranks, samples of a micro-batch, and their buses."""

    micro_batch: int
    tp: int
    cp: int
    tp_bus: Bus
    cp_bus: Bus


def forward(model: Transformer, stack: Stack, on: Chip, dealt: Dealt) -> Pass:
    """One block's forward pass."""
    products = sum(matmul(on, *shape) for shape in _products(model, dealt))
    scores, unfused = _attention(model, stack, on, dealt)
    moved = _moved(model, stack, on, dealt, backward=False)
    exposed = _collectives(model, stack, on, dealt, 2)
    launches = FORWARD_LAUNCHES + (0 if stack.fused_attention else UNFUSED_LAUNCHES)
    return Pass(
        arithmetic=products + scores,
        device=products + scores + elementwise(on, moved + unfused) + launches * stack.gap,
        exposed=exposed + _ring(model, on, dealt, scores, 2),
        host=launches * stack.launch + (2 * stack.collective if dealt.tp > 1 else 0.0),
    )


def backward(model: Transformer, stack: Stack, on: Chip, dealt: Dealt) -> Pass:
    """One block's backward pass, without recomputation: each product has two of its own size."""
    products = 0.0
    for rows, inner, columns in _products(model, dealt):
        products += matmul(on, rows, columns, inner) + matmul(on, inner, rows, columns)
    scores, unfused = _attention(model, stack, on, dealt)
    scores *= FUSED_BACKWARD if stack.fused_attention else 2.0
    moved = _moved(model, stack, on, dealt, backward=True)
    # With sequence parallelism the first product's input is gathered once more for its weight's gradient.
    every = _collectives(model, stack, on, dealt, 2) + (
        0.5 * _collectives(model, stack, on, dealt, 2) if stack.sequence_parallel else 0.0
    )
    launches = BACKWARD_LAUNCHES + (0 if stack.fused_attention else UNFUSED_LAUNCHES)
    return Pass(
        arithmetic=products + scores,
        device=products + scores + elementwise(on, moved + 11 / 9 * unfused) + launches * stack.gap,
        exposed=every * (1.0 - stack.tp_hidden) + _ring(model, on, dealt, scores, 4),
        hidden=every * stack.tp_hidden,
        host=launches * stack.launch + (2 * stack.collective if dealt.tp > 1 else 0.0),
    )


def again(model: Transformer, stack: Stack, on: Chip, dealt: Dealt, recompute: str) -> Pass:
    """What the backward pass computes once more: nothing, the scores, or the whole forward pass."""
    if recompute == "full":
        return forward(model, stack, on, dealt)
    if recompute == "selective" and not stack.fused_attention:
        scores, unfused = _attention(model, stack, on, dealt)
        first = scores / 2  # of the two products, the scores; and the weighted values' inputs
        return Pass(first, first + elementwise(on, unfused), host=(UNFUSED_LAUNCHES + 1) * stack.launch)
    return Pass()


def head(model: Transformer, stack: Stack, on: Chip, dealt: Dealt, *, backward: bool) -> float:
    """Seconds of the classifier and the loss for one micro-batch."""
    tokens = dealt.micro_batch * model.context / dealt.cp
    columns = model.vocab / dealt.tp
    one = matmul(on, tokens, model.d_model, columns)
    if stack.fused_loss:  # cast, and one kernel; their gradient
        moved = 6 if backward else 14
    else:  # in fp32, kernel by kernel: cast, maximum, difference, exponential, sum, quotient; their gradient
        moved = 14 if backward else 38
    return (2 * one if backward else one) + elementwise(on, tokens * columns * moved)


def stem(model: Transformer, on: Chip, dealt: Dealt, *, backward: bool) -> float:
    """Seconds of the embedding for one micro-batch: rows read and added, or gradients scattered."""
    tokens = dealt.micro_batch * model.context / dealt.cp
    return elementwise(on, tokens * model.d_model * on.item * (8 if backward else 4))


def _products(model: Transformer, dealt: Dealt) -> tuple[tuple[float, float, float], ...]:
    """(rows, inner, columns) of a block's products with weights."""
    tokens, h, t = dealt.micro_batch * model.context / dealt.cp, model.d_model, dealt.tp
    return (
        (tokens, h, (h + 2 * model.kv_width) / t),
        (tokens, h / t, h),
        (tokens, h, model.d_ff * (2 if model.gated else 1) / t),
        (tokens, model.d_ff / t, h),
    )


def _attention(model: Transformer, stack: Stack, on: Chip, dealt: Dealt) -> tuple[float, float]:
    """(seconds of the products of attention, bytes that softmax and dropout move between them)."""
    b, s, heads, width = dealt.micro_batch, model.context, model.n_head / dealt.tp, model.head_width
    rows = s / dealt.cp
    if stack.fused_attention:
        # Half of the scores are masked, and not computed.
        flops = 4.0 * b * rows * s * heads * width / 2.0
        return flops / (on.rate * stack.attention), 0.0
    both = matmul(on, rows, width, s, b * heads) + matmul(on, rows, s, width, b * heads)
    each = 2 * on.item + (2 * on.item + 1 if model.noisy else 0)
    return both, each * b * heads * rows * s


def _moved(model: Transformer, stack: Stack, on: Chip, dealt: Dealt, *, backward: bool) -> float:
    """Bytes of a block's elementwise kernels beside attention."""
    tokens, h, e = dealt.micro_batch * model.context / dealt.cp, model.d_model, on.item
    mask = 1 if model.noisy else 0
    if backward:
        norms, joins, active = 2 * 4 * e, 2 * (3 * e + mask), (5 if model.gated else 3) * e
    else:
        norms, joins, active = 2 * 2 * e, 2 * (3 * e + mask), (3 if model.gated else 2) * e
    shared = dealt.tp if stack.sequence_parallel else 1
    turned = 2 * e * (h + 2 * model.kv_width)  # heads are moved to the front
    return tokens * ((norms + joins) * h / shared + (active * model.d_ff + turned) / dealt.tp)


def _collectives(model: Transformer, stack: Stack, on: Chip, dealt: Dealt, count: int) -> float:
    """Seconds of `count` all-reduces of a block's activations; gather and scatter with sequence parallelism are one."""
    if dealt.tp == 1:
        return 0.0
    moved = dealt.micro_batch * model.context / dealt.cp * model.d_model * on.item
    return count * (stack.collective + dealt.tp_bus.all_reduce(moved))


def _ring(model: Transformer, on: Chip, dealt: Dealt, scores: float, tensors: int) -> float:
    """Seconds that the ring of keys and values (and of their gradients) shows beside its attention."""
    if dealt.cp == 1:
        return 0.0
    moved = tensors * dealt.micro_batch * model.context * model.kv_width / dealt.tp * on.item
    return max(0.0, dealt.cp_bus.gather(moved) - scores * (dealt.cp - 1) / dealt.cp)

"""Seconds of one transformer block, forward and backward, on one rank; and of stem and head.

Bytes of elementwise kernels are counted as the usual fused kernels read and write them: norm; bias, dropout and
residual; activation; and, where attention is not fused, scale, mask and softmax, and dropout of the scores.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from unisono.plan import Plan
from unisono.planner import experts
from unisono.planner.collectives import ALONE, Bus, Exchange, bus, exchange
from unisono.planner.kernels import Chip, elementwise, matmul, soft_max
from unisono.planner.machines.cluster import Cluster, Source
from unisono.planner.machines.order import stride
from unisono.planner.memory import own_list
from unisono.planner.stack import Stack
from unisono.planner.timetables import of
from unisono.planner.work.transformer import Transformer, crossings

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
class PassSeconds:
    """Seconds of one pass over one block. arithmetic: matrix products alone, attention: of these. device: all kernels.
    exposed, hidden: of tp's collectives; context, ringed: of cp's; routing, routed: of ep's. host: to start it all.
    total: what the clock shows."""

    arithmetic: float = 0.0
    device: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    host: float = 0.0
    context: float = 0.0
    ringed: float = 0.0
    routing: float = 0.0
    routed: float = 0.0
    attention: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds of the device, with what it waits for the network."""
        return self.device + self.exposed + self.context + self.routing

    @property
    def total(self) -> float:
        return soft_max(self.busy, self.host)

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(
            self.arithmetic + other.arithmetic,
            self.device + other.device,
            self.exposed + other.exposed,
            self.hidden + other.hidden,
            self.host + other.host,
            self.context + other.context,
            self.ringed + other.ringed,
            self.routing + other.routing,
            self.routed + other.routed,
            self.attention + other.attention,
        )


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """How one block is dealt: tensor and context ranks, samples of a micro-batch, and their buses; expert ranks and
    their network, and whether the timetable hides it behind another micro-batch. heads: cp's network for all-to-alls
    where it deals out heads (Ulysses), None where keys and values go round a ring."""

    micro_batch: int
    tp: int
    cp: int
    tp_bus: Bus
    cp_bus: Bus
    ep: int = 1
    ep_net: Exchange = ALONE
    covered: bool = False
    heads: Exchange | None = None


def dealt(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> BlockSplit:
    """How a block is dealt."""
    spread, order = None, cluster.order
    if plan.cp > 1 and plan.cp_kind == "ulysses":
        spread = exchange(cluster, stride(plan, "cp", order), plan.cp, stack.tp_bus)
    return BlockSplit(
        micro_batch,
        plan.tp,
        plan.cp,
        bus(cluster, stride(plan, "tp", order), plan.tp, stack.tp_bus),
        bus(cluster, stride(plan, "cp", order), plan.cp, stack.tp_bus),
        plan.ep,
        exchange(cluster, stride(plan, "ep", order), plan.ep, stack.tp_bus),
        of(plan.schedule).overlapped,
        spread,
    )


def forward(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit) -> PassSeconds:
    """One block's forward pass."""
    products = sum(share * matmul(on, *shape) for share, *shape in _products(model, dealt))
    scores, unfused = _attention(model, stack, on, dealt)
    moved = _moved(model, stack, on, dealt, backward=False)
    exposed = _collectives(model, stack, on, dealt)
    launches = FORWARD_LAUNCHES + (0 if stack.fused_attention else UNFUSED_LAUNCHES)
    context, ringed = _context(model, on, dealt, scores, 1)
    launches += model.sparse_share * experts.LAUNCHES
    device = products + scores + elementwise(on, moved + unfused) + launches * stack.gap
    routing, routed = _routing(model, on, dealt, device)
    return PassSeconds(
        arithmetic=products + scores,
        device=device,
        exposed=exposed,
        context=context,
        ringed=ringed,
        host=launches * stack.launch + 2 * _meeting(stack, dealt.tp),
        routing=routing,
        routed=routed,
        attention=scores,
    )


def backward(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit) -> PassSeconds:
    """One block's backward pass, without recomputation: each product has two of its own size."""
    products = 0.0
    for share, rows, inner, columns, many in _products(model, dealt):
        products += share * (matmul(on, rows, columns, inner, many) + matmul(on, inner, rows, columns, many))
    scores, unfused = _attention(model, stack, on, dealt)
    scores *= FUSED_BACKWARD if stack.fused_attention else 2.0
    moved = _moved(model, stack, on, dealt, backward=True)
    # With sequence parallelism the first product's input is gathered once more for its weight's gradient.
    every = _collectives(model, stack, on, dealt, backward=True)
    every *= 1.5 if stack.sequence_parallel and not own_list(model, stack) else 1.0
    launches = BACKWARD_LAUNCHES + (0 if stack.fused_attention else UNFUSED_LAUNCHES)
    context, ringed = _context(model, on, dealt, scores, 2)
    launches += 2 * model.sparse_share * experts.LAUNCHES
    device = products + scores + elementwise(on, moved + 11 / 9 * unfused) + launches * stack.gap
    routing, routed = _routing(model, on, dealt, device)
    return PassSeconds(
        arithmetic=products + scores,
        device=device,
        exposed=every * (1.0 - stack.tp_hidden),
        context=context,
        ringed=ringed,
        hidden=every * stack.tp_hidden,
        host=launches * stack.launch + 2 * _meeting(stack, dealt.tp),
        routing=routing,
        routed=routed,
        attention=scores,
    )


def again(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit, recompute: str) -> PassSeconds:
    """What the backward pass computes once more: nothing, the scores, or the whole forward pass."""
    if recompute == "full":
        ahead = forward(model, stack, on, dealt)
        return replace(ahead, exposed=_collectives(model, stack, on, dealt, again=True))
    if recompute == "selective" and not stack.fused_attention:
        scores, unfused = _attention(model, stack, on, dealt)
        first = scores / 2  # of the two products, the scores; and the weighted values' inputs
        host = (UNFUSED_LAUNCHES + 1) * stack.launch
        return PassSeconds(first, first + elementwise(on, unfused), host=host, attention=first)
    return PassSeconds()


def classifier(model: Transformer, on: Chip, dealt: BlockSplit, *, backward: bool) -> float:
    """Seconds of the classifier's products for one micro-batch."""
    tokens = dealt.micro_batch * model.context / dealt.cp
    return matmul(on, tokens, model.d_model, model.vocab / dealt.tp) * (2 if backward else 1)


def head(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit, *, backward: bool) -> float:
    """Seconds of the classifier and the loss for one micro-batch."""
    logits = dealt.micro_batch * model.context / dealt.cp * model.vocab / dealt.tp
    if stack.fused_loss:  # cast, and one kernel; their gradient
        moved = 6 if backward else 14
    else:  # in fp32, kernel by kernel: cast, maximum, difference, exponential, sum, quotient; their gradient
        moved = 14 if backward else 38
    return classifier(model, on, dealt, backward=backward) + elementwise(on, logits * moved)


def stem(model: Transformer, on: Chip, dealt: BlockSplit, *, backward: bool) -> float:
    """Seconds of the embedding for one micro-batch: rows read and added, or gradients scattered."""
    tokens = dealt.micro_batch * model.context / dealt.cp
    return elementwise(on, tokens * model.d_model * on.item * (8 if backward else 4))


def _products(model: Transformer, dealt: BlockSplit) -> list[tuple[float, float, float, float, float]]:
    """(share of the blocks that have it, rows, inner, columns, how many) of a block's products with weights."""
    tokens, h, t = dealt.micro_batch * model.context / dealt.cp, model.d_model, dealt.tp
    found = [
        (1.0, tokens, inner / (t if row_wise else 1), columns / (t if column_wise else 1), 1.0)
        for inner, columns, row_wise, column_wise in model.attention_products
    ]
    if model.sparse_share < 1.0:
        dense = 1.0 - model.sparse_share
        found.append((dense, tokens, h, model.d_ff * (2 if model.gated else 1) / t, 1.0))
        found.append((dense, tokens, model.d_ff / t, h, 1.0))
    if model.experts:
        each = experts.products(model, model.experts, tokens, t, dealt.ep)
        found += [(model.sparse_share, *shape) for shape in each]
    return found


def _routing(model: Transformer, on: Chip, dealt: BlockSplit, device: float) -> tuple[float, float]:
    """Seconds of ep's all-to-alls in one pass, shown and hidden: the timetable that covers them has as long as the
    other micro-batch computes (DeepSeek-V3 report, 2024, section 3.2.1)."""
    if model.experts is None:
        return 0.0, 0.0
    tokens = dealt.micro_batch * model.context / dealt.cp
    one = experts.talk(model, model.experts, on, dealt.ep_net, dealt.tp_bus, tokens, dealt.ep)
    seconds = model.sparse_share * one
    hidden = min(seconds, device) if dealt.covered else 0.0
    return seconds - hidden, hidden


def _attention(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit) -> tuple[float, float]:
    """(seconds of the products of attention, bytes that softmax and dropout move between them)."""
    b, s, heads, (inner, width) = (
        dealt.micro_batch,
        model.context,
        model.n_head / dealt.tp,
        model.score_widths,
    )
    rows = s / dealt.cp
    if stack.fused_attention:
        # Half of the scores are masked, and not computed.
        flops = 2.0 * b * rows * s * heads * (inner + width) / 2.0
        return flops / (on.rate * on.attention), 0.0
    both = matmul(on, rows, inner, s, b * heads) + matmul(on, rows, s, width, b * heads)
    each = 2 * on.item + (2 * on.item + 1 if model.noisy else 0)
    return both, each * b * heads * rows * s


def _moved(model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit, *, backward: bool) -> float:
    """Bytes of a block's elementwise kernels beside attention."""
    tokens, h, e = dealt.micro_batch * model.context / dealt.cp, model.d_model, on.item
    mask = 1 if model.noisy else 0
    if backward:
        norms, joins, active = 2 * 4 * e, 2 * (3 * e + mask), (5 if model.gated else 3) * e
    else:
        norms, joins, active = 2 * 2 * e, 2 * (3 * e + mask), (3 if model.gated else 2) * e
    shared = dealt.tp if stack.sequence_parallel else 1
    turned = 2 * e * model.qkv_width  # heads are moved to the front
    hidden = active * model.d_ff * (1.0 - model.sparse_share)
    sparse = 0.0
    if model.experts:
        sparse = experts.moved(model, model.experts, tokens, dealt.tp, dealt.ep, e, active)
    return (
        tokens * ((norms + joins) * h / shared + (hidden + turned) / dealt.tp) + model.sparse_share * sparse
    )


def reduces(model: Transformer, ep: int) -> float:
    """All-reduces of activations on tp in one pass over the mean block; a gather and a scatter of sequence parallelism
    are one. Tokens of a sparse layer go to their experts by all-to-all instead."""
    some = model.experts
    return 2.0 - (model.sparse_share if some is not None and ep > 1 and not some.shared_width else 0.0)


def _meeting(stack: Stack, size: int) -> float:
    """Seconds that a collective takes whatever its bytes, until the last of its ranks is there."""
    return stack.collective + stack.member * size if size > 1 else 0.0


def _collectives(
    model: Transformer, stack: Stack, on: Chip, dealt: BlockSplit, backward: bool = False, again: bool = False
) -> float:
    """Seconds of what crosses tp in one pass: as our own program makes it, or all-reduces."""
    if dealt.tp == 1:
        return 0.0
    tokens = dealt.micro_batch * model.context / dealt.cp
    if own_list(model, stack):
        made = crossings(model, tokens, on.item, backward, again)
        return sum(
            times * (_meeting(stack, dealt.tp) / 2 + dealt.tp_bus.gather(nbytes)) for nbytes, times in made
        )
    moved = tokens * model.d_model * on.item
    return reduces(model, dealt.ep) * (_meeting(stack, dealt.tp) + dealt.tp_bus.all_reduce(moved))


def context_bytes(model: Transformer, dealt: BlockSplit, item: int, ways: int) -> float:
    """Bytes that a rank sends on cp for one block in one direction. ways: 1 forward, 2 backward round a ring, where
    keys and values come again and their gradients go round."""
    tokens = dealt.micro_batch * model.context / dealt.cp
    if dealt.heads is None:
        return ways * (dealt.cp - 1) * tokens * 2 * model.kv_width / dealt.tp * item
    # Queries, keys and values to their heads' ranks, results back; backward their gradients, the other way.
    return dealt.heads.sent(tokens * model.attended / dealt.tp * item)


def _context(
    model: Transformer, on: Chip, dealt: BlockSplit, scores: float, ways: int
) -> tuple[float, float]:
    """Seconds of cp that show beside attention, and that do not.

    Ring: keys and values go round while scores are computed (Liu et al., 2023). Ulysses: all-to-alls before and after
    attention, which nothing hides (Jacobs et al., 2023).
    """
    if dealt.cp == 1:
        return 0.0, 0.0
    tokens = dealt.micro_batch * model.context / dealt.cp
    if dealt.heads is not None:
        there = dealt.heads.all_to_all(tokens * model.qkv_width / dealt.tp * on.item)
        back = dealt.heads.all_to_all(tokens * (model.attended - model.qkv_width) / dealt.tp * on.item)
        return there + back, 0.0
    moved = ways * 2 * dealt.micro_batch * model.context * model.kv_width / dealt.tp * on.item
    seconds = dealt.cp_bus.gather(moved)
    shown = max(0.0, seconds - scores * (dealt.cp - 1) / dealt.cp)
    return shown, seconds - shown

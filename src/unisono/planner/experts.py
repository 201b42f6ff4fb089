"""How a sparse layer is dealt and what its experts cost: grouped products on the tokens that arrive, and the
all-to-alls that bring them.

`ep` re-uses the ranks of shard · cp · tp, the innermost first. Where it is smaller than tp, the rest of tp cuts each
expert; where it is larger, it reaches over cp and shard, and fewer ranks hold the same expert.
"""

from dataclasses import dataclass
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.collectives import Bus, Exchange
from unisono.planner.kernels import Chip, matmul
from unisono.planner.machines.cluster import Source
from unisono.planner.work.experts import Experts, matrices
from unisono.planner.work.transformer import Transformer

_COUNTED = (
    "of a sparse layer beside a dense one's: router, softmax, choice of the k, counting and sorting (3), two"
    " permutations, a second product of each kind for shared experts; counted"
)
LAUNCHES: Annotated[int, Source("specification", _COUNTED)] = 10


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Who holds an expert. cut: ranks that share one expert by its width. local: experts of a rank. copies: ranks of a
    replica that hold the same ones; `owners`: of them, those that ZeRO may deal them to."""

    cut: int
    local: float
    copies: int
    owners: int


def group(experts: Experts, plan: Plan) -> ExpertGroup:
    cut = max(1, plan.tp // plan.ep)
    copies = max(1, plan.shard * plan.cp * plan.tp // (plan.ep * cut))
    return ExpertGroup(cut, experts.count / plan.ep, copies, copies if plan.shard > 1 else 1)


def elements(model: Transformer, plan: Plan) -> tuple[float, int]:
    """(elements of one layer's routed experts on one rank before ZeRO, ranks that ZeRO deals them to)."""
    if model.experts is None:
        return 0.0, 1
    own = group(model.experts, plan)
    return model.layer_experts / (plan.ep * own.cut), own.owners


def products(
    model: Transformer, experts: Experts, tokens: float, tp: int, ep: int
) -> list[tuple[float, float, float, float]]:
    """(rows, inner, columns, how many) of a sparse layer's products. tokens: of one micro-batch on one cp rank.

    An expert's rows are the mean's, times the load of the fullest: the others wait for it.
    """
    h, ups, cut = model.d_model, matrices(model.gated) - 1, max(1, tp // ep)
    rows = tokens / tp * experts.top_k * ep * cut / experts.count * experts.factor
    local = experts.count / ep
    found = [
        (tokens / tp, float(h), float(experts.count), 1.0),
        (rows, float(h), ups * experts.width / cut, local),
        (rows, experts.width / cut, float(h), local),
    ]
    if experts.shared_width:
        found += [
            (tokens, float(h), ups * experts.shared_width / tp, 1.0),
            (tokens, experts.shared_width / tp, float(h), 1.0),
        ]
    return found


def arriving(experts: Experts, tokens: float, tp: int, ep: int) -> float:
    """Tokens, each as often as it is routed, that one rank's experts compute on."""
    return tokens / tp * experts.top_k * max(1, tp // ep) * experts.factor


def forward(model: Transformer, experts: Experts, on: Chip, tokens: float, tp: int, ep: int) -> float:
    """Seconds of the products, forward."""
    return sum(matmul(on, *shape) for shape in products(model, experts, tokens, tp, ep))


def backward(model: Transformer, experts: Experts, on: Chip, tokens: float, tp: int, ep: int) -> float:
    """Seconds of the products, backward: two for each."""
    return sum(
        matmul(on, rows, columns, inner, many) + matmul(on, inner, rows, columns, many)
        for rows, inner, columns, many in products(model, experts, tokens, tp, ep)
    )


def moved(
    model: Transformer, experts: Experts, tokens: float, tp: int, ep: int, item: int, active: int
) -> float:
    """Bytes of elementwise kernels: tokens put in the order of experts and back, the activation (`active` bytes an
    element), the router's softmax in fp32."""
    here = arriving(experts, tokens, tp, ep)
    hidden = here * experts.width / max(1, tp // ep) + tokens * experts.shared_width / tp
    return here * 4 * item * model.d_model + active * hidden + tokens / tp * experts.count * 16


def exchanged(model: Transformer, experts: Experts, tokens: float, tp: int, item: int) -> float:
    """Bytes of one all-to-all that one rank holds: its tokens, once for each expert that they go to."""
    return tokens / tp * experts.top_k * experts.factor * model.d_model * item


def talk(
    model: Transformer, experts: Experts, on: Chip, net: Exchange, tp_bus: Bus, tokens: float, ep: int
) -> float:
    """Seconds to send tokens to their experts and back; where an expert is cut, its ranks gather them and sum."""
    tp = tp_bus.size
    if ep == 1:
        return 0.0
    there = net.dispatch(exchanged(model, experts, tokens, tp, on.item), experts.top_k)
    cut = max(1, tp // ep)
    if cut == 1:
        return 2 * there
    gathered = arriving(experts, tokens, tp, ep) * model.d_model * on.item
    return 2 * there + 2 * Bus(cut, tp_bus.rate, tp_bus.hops).gather(gathered)

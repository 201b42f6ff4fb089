"""Expert parallelism: who holds which experts, their grouped products, and the all-to-alls that bring tokens.

`ep` re-uses the ranks of shard x cp x tp, the innermost first. Where ep < tp, the rest of tp splits each expert by
its width; where ep > tp, it extends over cp and shard, and fewer ranks hold the same expert.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from unisono.plan import Plan
from unisono.planner.source import Source
from unisono.planner.work.experts import Experts, matrices
from unisono.planner.work.stage import Transfer
from unisono.planner.work.transformer import Transformer

_RUNTIME = Source("specification", "models.moe.routing: numbers and loads are int64, what is kept is bool")
INDEX: Annotated[float, _RUNTIME] = 8.0  # bytes of the number of an expert
FLAG: Annotated[float, _RUNTIME] = 1.0  # of whether a choice is kept


class HeldExperts(NamedTuple):
    """Elements of one sparse layer's experts on one rank of ours. matrices, biases: ranks that share an expert split
    its matrices and keep its biases whole. apart: `shard` does not shard them."""

    matrices: float
    biases: float
    apart: bool


def held_experts(model: Transformer, plan: Plan) -> HeldExperts:
    """Return the experts that one rank holds; zeros for a dense model."""
    experts = model.experts
    if experts is None:
        return HeldExperts(0.0, 0.0, False)
    each = matrices(model.gated) * model.d_model * experts.width
    flat = (matrices(model.gated) - 1) * experts.width + model.d_model if model.bias else 0
    cut = max(1, plan.tp // plan.ep)
    dealt = plan.ep * plan.tp > 1
    over = dealt and plan.shard > 1 and (plan.cp * plan.tp % plan.ep > 0 or plan.cp > 1)
    return HeldExperts(experts.count * each / (plan.ep * cut), experts.count * flat / plan.ep, over)


_COUNTED = (
    "of a sparse layer beside a dense one's: router, softmax, choice of the k, counting and sorting (3), two"
    " permutations, a second product of each kind for shared experts; counted"
)
LAUNCHES: Annotated[int, Source("specification", _COUNTED)] = 10


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Ranks that hold one expert. cut: ranks that split it by its width. local: experts of a rank. copies: ranks of a
    replica that hold the same experts. owners: of these, ranks over which ZeRO may shard them."""

    cut: int
    local: float
    copies: int
    owners: int


def group(experts: Experts, plan: Plan) -> ExpertGroup:
    cut = max(1, plan.tp // plan.ep)
    copies = max(1, plan.shard * plan.cp * plan.tp // (plan.ep * cut))
    return ExpertGroup(cut, experts.count / plan.ep, copies, copies if plan.shard > 1 else 1)


def elements(model: Transformer, plan: Plan) -> tuple[float, int]:
    """Return (elements of one layer's routed experts on one rank before ZeRO, ranks over which ZeRO shards them)."""
    if model.experts is None:
        return 0.0, 1
    holders = group(model.experts, plan)
    return model.layer_experts / (plan.ep * holders.cut), holders.owners


def products(
    model: Transformer, experts: Experts, tokens: float, tp: int, ep: int
) -> list[tuple[float, float, float, float]]:
    """(rows, inner, columns, how many) of a sparse layer's products. tokens: of one micro-batch on one cp rank.

    An expert's rows are the mean's, times the load of the fullest: the others wait for it.
    """
    h, ups, cut = model.d_model, matrices(model.gated) - 1, max(1, tp // ep)
    rows = tokens / tp * experts.top_k * ep * cut / experts.count * experts.factor
    local = experts.count / ep
    shapes = [
        (tokens / tp, float(h), float(experts.count), 1.0),
        (rows, float(h), ups * experts.width / cut, local),
        (rows, experts.width / cut, float(h), local),
    ]
    if experts.shared_width:
        shapes += [
            (tokens, float(h), ups * experts.shared_width / tp, 1.0),
            (tokens, experts.shared_width / tp, float(h), 1.0),
        ]
    return shapes


def arriving(experts: Experts, tokens: float, tp: int, ep: int) -> float:
    """Tokens, each as often as it is routed, that one rank's experts compute on."""
    return tokens / tp * experts.top_k * max(1, tp // ep) * experts.factor


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


def calls(
    model: Transformer, experts: Experts, plan: Plan, tokens: float, item: int, behind: str
) -> list[Transfer]:
    """In one pass over a sparse layer: tokens to their experts and back; where an expert is cut, its ranks gather them
    and sum."""
    if plan.ep == 1:
        return []
    held = exchanged(model, experts, tokens, plan.tp, item)
    transfers = [Transfer("ep", "dispatch", held, 2.0, behind=behind, copies=experts.top_k)]
    if plan.tp > plan.ep:
        gathered = arriving(experts, tokens, plan.tp, plan.ep) * model.d_model * item
        transfers.append(Transfer("cut", "all_gather", gathered, 2.0, behind=behind))
    return transfers

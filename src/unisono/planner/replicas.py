"""What crosses `dp` under a codec and a policy: bytes, seconds, what shows of them, and how faithful it is.

Bytes of codecs are those of their formats, counted; encoding is priced as bytes moved through memory, which holds where
kernels are fused and memory-bound, as on accelerators. On CPUs exact top-k is up to thirty times slower.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from unisono.plan import Plan
from unisono.plan.grammar import Choice, choice
from unisono.plan.plan import DEFAULTS
from unisono.planner.collectives import Bus, bus, uncovered
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.stack import Stack
from unisono.planner.work.transformer import Transformer
from unisono.spec.fidelity import Fidelity

_SHARE = 0.01  # of the elements that sparse codecs send where no ratio is said
_LEVELS = 127  # of qsgd where no s is said: a byte with its sign
# Of what overlaps by design, as the plain stack's dp_hidden: computing beside it is 1.1 to 1.3 times slower.
_BESIDE = 0.8
_INDEX = 2  # bytes of an index in a chunk of 4096 or 65536


@dataclass(frozen=True, slots=True)
class Code:
    """A codec for one gradient of fp32.

    sent: bytes of one element that a rank hands over. gathered: whether everybody gets everybody's code, of which the
    bytes grow with the ranks; otherwise codes meet in an all-reduce, or in two shots (all-to-all of codes, sum, and
    all-gather of the sum's code), which send as much. passes: bytes that encoding and decoding move through memory
    for one element. said: what is lost, "" for nothing.
    """

    sent: float
    gathered: bool
    passes: float
    said: str


def code(text: str, ranks: int, plain: float, low_rank: Callable[[int], float]) -> Code:
    """The codec of a plan's `codec=`. plain: bytes of an element without one. low_rank: share of the elements that two
    factors of a rank r have."""
    got = choice(text)
    made = _formats(got, ranks, plain, low_rank)
    # Error feedback reads and writes what was left, and adds it to the gradient; momentum correction the velocity too.
    extra = 12.0 * ("ef" in got.marks) + 12.0 * ("mc" in got.marks)
    return Code(made.sent, made.gathered, made.passes + extra, made.said)


def _formats(got: Choice, ranks: int, plain: float, low_rank: Callable[[int], float]) -> Code:
    ratio = float(got.options.get("ratio", _SHARE))
    kept = f"{100 * ratio:.3g} % of the elements are sent"
    if got.name == "cast":  # read 4 and write 2, and back
        return Code(2.0, False, 12.0, "elements are rounded to 16 bits")
    if got.name == "int8":
        # Blocks of 256 with a 16-bit scale (EQuARX, 2025). Maximum, round; sum codes; the same again; decode.
        return Code(
            1.0 + 2.0 / 256.0,
            False,
            9.0 + (1.0 + 13.0 / ranks) + 5.0,
            "elements are rounded to 8 bits, twice",
        )
    if got.name == "qsgd":  # sign and level, a norm of 4 bytes for 512 elements (Alistarh et al., 2017)
        bits = ceil(log2(2 * int(got.options.get("s", _LEVELS)) + 1))
        sent = bits / 8.0 + 4.0 / 512.0
        return Code(
            sent, False, 8.0 + 2 * sent + (4.0 + sent), f"elements are rounded at random to {bits} bits"
        )
    if got.name == "sign":  # one bit, a scale for each bucket (Karimireddy et al., 2019)
        return Code(1.0 / 8.0, False, 8.0 + 0.25 + 4.125, "signs alone are sent")
    if got.name == "ternary":  # codes add up as small integers (Wen et al., 2017)
        bits = ceil(log2(2 * ranks + 1))
        return Code(bits / 8.0, False, 8.0 + bits / 4.0 + 4.0, "elements become -1, 0 or 1 times a scale")
    if got.name in ("topk", "threshold"):
        # A sample finds the threshold; one pass keeps what is above; everybody's pairs are added up.
        pair = 4.0 + _INDEX
        return Code(ratio * pair, True, 8.0 + ratio * (pair + ranks * (pair + 8.0)), f"the largest: {kept}")
    if got.name in ("randomk", "block"):  # all choose the same, so that values add up without indices
        return Code(ratio * 4.0, False, ratio * 16.0 + 4.0, kept)
    if got.name == "powersgd":  # two products with the gradient, one of the factors (Vogels et al., 2019)
        r = int(got.options["r"])
        return Code(4.0 * low_rank(r), False, 12.0, f"gradients of matrices become products of rank {r}")
    return Code(plain, False, 0.0, "")


def low_rank(model: Transformer, tp: int) -> Callable[[int], float]:
    """r -> elements of factors of rank r, and of what is no matrix, beside the elements of a block's gradient."""

    def share(r: int) -> float:
        h, ff = model.d_model, model.d_ff
        # (rows, columns) of a block's matrices as tp deals them
        matrices = ((h, (h + 2 * model.kv_width) / tp), (h / tp, h), (h, ff / tp), (ff / tp, h))
        matrices += ((h, ff / tp),) if model.gated else ()
        whole = sum(rows * columns for rows, columns in matrices)
        dealt, kept = model.block_parameters
        rest = max(0.0, dealt / tp + kept - whole)
        # A factor is no smaller than its matrix where r is not below both sides.
        factors = sum(min(r * (rows + columns), rows * columns) for rows, columns in matrices)
        return (factors + rest) / (whole + rest)

    return share


@dataclass(frozen=True, slots=True)
class Cover:
    """Seconds that communication may hide behind; numbers, or arrays. backward: of the last micro-batch. step: of all
    computing. hidden: the share of gradients that software hides behind backward at most."""

    backward: float
    step: float
    hidden: float

    def beside_backward(self, talk: float) -> float:
        return uncovered(talk, self.backward, self.hidden)

    def beside_step(self, talk: float) -> float:
        """Of a policy that is made to talk while it computes, whatever the software does with gradients."""
        return uncovered(talk, self.step, _BESIDE)


def wired(made: Code, net: Bus, elements: float) -> tuple[float, float]:
    """(bytes that a rank sends, seconds) of one exchange."""
    moved = made.sent * elements
    if made.gathered:
        return (net.size - 1) * moved, net.gather(net.size * moved)
    return net.sent(moved), net.all_reduce(moved)


def traffic(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, elements: float, cover: Cover
) -> tuple[float, float, float]:
    """What `on_dp` says, of a plan on a cluster. elements: of one rank's gradient."""
    made = code(plan.codec, plan.dp, stack.reduce_bytes, low_rank(model, plan.tp))
    net = bus(cluster, stride(plan, "dp", cluster.order), plan.dp, stack.dp_bus)
    return on_dp(plan, made, net, elements, cluster.device.bandwidth * stack.elementwise, cover)


def on_dp(
    plan: Plan, made: Code, net: Bus, elements: float, memory: float, cover: Cover
) -> tuple[float, float, float]:
    """(bytes that a rank sends, seconds, seconds that show) in a step, in the mean over steps.

    elements: of one rank's gradient. memory: bytes/s that elementwise kernels move.
    """
    policy = choice(plan.sync)
    sent, wire = wired(made, net, elements)
    encode = made.passes * elements / memory
    if policy.name in ("local_sgd", "diloco"):
        # Weights (or how far they went) meet after the update, and all wait. The outer update reads weights, their last
        # common value and its momentum and writes all three (Douillard et al., 2023).
        h = int(policy.options["h"])
        outer = 24.0 * elements / memory if policy.name == "diloco" else 0.0
        return sent / h, (wire + encode + outer) / h, (wire + encode + outer) / h
    if policy.name == "delayed":  # the whole next step may hide it
        return sent, wire + encode, encode + cover.beside_step(wire)
    if policy.name == "gossip":  # weights go to one peer, while gradients are computed (Lian et al., 2017)
        moved = made.sent * elements
        one = net.hops / max(1, net.size - 1) + moved / net.rate
        return moved, one + encode, encode + cover.beside_step(one)
    if policy.name in ("ssp", "async"):
        # A server sharded over all ranks: gradients go out while they are computed, weights come back before the next
        # step (Li et al., 2014): half the bytes each.
        return sent, wire + encode, encode + 0.5 * wire + cover.beside_backward(0.5 * wire)
    if policy.name == "hogwild":  # shared memory: read weights, add to them (Recht et al., 2011)
        shared = 12.0 * elements / memory
        return 0.0, shared, shared
    return sent, wire + encode, encode + cover.beside_backward(wire)


def plain(plan: Plan) -> bool:
    """Whether replicas meet in every step with uncoded gradients."""
    return plan.codec == DEFAULTS["codec"] and choice(plan.sync).name in (
        "every_step",
        "canonical",
        "quorum",
        "adaptive",
    )


def fidelity(plan: Plan, made: Code | None = None) -> tuple[Fidelity, str]:
    """How close the plan's result is to one device's, and why."""
    policy, reasons = choice(plan.sync), []
    if plan.dp > 1:
        said = {
            "delayed": "updates use gradients that are one step old",
            "local_sgd": f"replicas go {policy.options.get('h', '?')} steps apart between averages",
            "diloco": f"replicas go {policy.options.get('h', '?')} steps apart between outer steps",
            "gossip": "replicas average with neighbours alone",
            "quorum": f"only the first {policy.options.get('k', '?')} of {plan.dp} replicas count in a step",
            "ssp": f"weights may be {policy.options.get('s', '?')} steps old",
            "async": f"weights are {plan.dp - 1} updates old in the mean",
            "hogwild": "ranks write over each other",
            "adaptive": "replicas go apart between averages; priced as if they met in every step",
        }
        reasons += [f"sync={plan.sync}: {said[policy.name]}"] if policy.name in said else []
        reasons += [f"codec={plan.codec}: {made.said}"] if made is not None and made.said else []
    if reasons:
        return Fidelity.LOSSY, "; ".join(reasons)
    if policy.name == "canonical":
        return Fidelity.EXACT, "the same bits for any dp, shard and pp"
    return Fidelity.ROUNDING, "the same up to the order of summation"

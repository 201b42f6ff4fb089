"""What crosses `dp` under a codec and a policy: bytes, seconds, what shows of them, and how faithful it is.

A member of ours, or a user's, declares what it sends. Those that the contract knows and this version lacks stand here:
bytes are those of their formats, counted; encoding is priced as bytes moved through memory, which holds where kernels
are fused and memory-bound, as on accelerators. On CPUs exact top-k is up to thirty times slower.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.plan.grammar import Choice, choice, member
from unisono.planner.collectives import Bus, bus, uncovered
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.fidelity import Fidelity

_SHARE = 0.01  # of the elements that sparse codecs send where no ratio is said
_LEVELS = 127  # of qsgd where no s is said: a byte with its sign
# Of what overlaps by design, as the plain stack's dp_hidden: computing beside it is 1.1 to 1.3 times slower.
_BESIDE = 0.8
_PAIR = 4.0 + 2.0  # bytes of an element and of its index in a chunk of 4096 or 65536
_COUNTED = 1 << 20  # elements for which a member is asked what it sends


@dataclass(frozen=True, slots=True)
class Code:
    """A codec for one gradient of fp32.

    sent: bytes of one element that a rank hands over. gathered: whether everybody gets everybody's code, of which the
    bytes grow with the ranks; otherwise codes meet in an all-reduce, or in two shots (all-to-all of codes, sum, and
    all-gather of the sum's code), which send as much. passes: bytes that encoding and decoding move through memory
    for one element. said: what is lost, "" for nothing.
    """

    sent: float
    gathered: bool = False
    passes: float = 0.0
    said: str = ""


Ranked = Callable[[int], float]  # r -> share of the elements that two factors of rank r have


def _ratio(got: Choice) -> tuple[float, str]:
    ratio = float(got.options.get("ratio", _SHARE))
    return ratio, f"{100 * ratio:.3g} % of the elements are sent"


def _int8(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    # Blocks of 256 with a 16-bit scale (EQuARX, 2025). Maximum, round; sum codes; the same again; decode.
    passes = 9.0 + (1.0 + 13.0 / ranks) + 5.0
    return Code(1.0 + 2.0 / 256.0, False, passes, "elements are rounded to 8 bits, twice")


def _qsgd(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    # Sign and level, a norm of 4 bytes for 512 elements (Alistarh et al., 2017).
    bits = ceil(log2(2 * int(got.options.get("s", _LEVELS)) + 1))
    sent = bits / 8.0 + 4.0 / 512.0
    return Code(sent, False, 8.0 + 2 * sent + (4.0 + sent), f"elements are rounded at random to {bits} bits")


def _ternary(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    bits = ceil(log2(2 * ranks + 1))  # codes add up as small integers (Wen et al., 2017)
    return Code(bits / 8.0, False, 8.0 + bits / 4.0 + 4.0, "elements become -1, 0 or 1 times a scale")


def _largest(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    # A sample finds the threshold; one pass keeps what is above; everybody's pairs are added up.
    ratio, kept = _ratio(got)
    return Code(ratio * _PAIR, True, 8.0 + ratio * (_PAIR + ranks * (_PAIR + 8.0)), f"the largest: {kept}")


def _chosen(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    ratio, kept = _ratio(got)  # all choose the same, so that values add up without indices
    return Code(ratio * 4.0, False, ratio * 16.0 + 4.0, kept)


def _powersgd(got: Choice, ranks: int, low_rank: Ranked) -> Code:
    r = int(got.options["r"])  # two products with the gradient, one of the factors (Vogels et al., 2019)
    return Code(4.0 * low_rank(r), False, 12.0, f"gradients of matrices become products of rank {r}")


_CODES: Mapping[str, Callable[[Choice, int, Ranked], Code]] = {
    # Read 4 and write 2, and back.
    "cast": lambda got, ranks, low_rank: Code(2.0, False, 12.0, "elements are rounded to 16 bits"),
    "int8": _int8,
    "qsgd": _qsgd,
    # One bit, a scale for each bucket (Karimireddy et al., 2019).
    "sign": lambda got, ranks, low_rank: Code(1.0 / 8.0, False, 8.0 + 0.25 + 4.125, "signs alone are sent"),
    "ternary": _ternary,
    "topk": _largest,
    "threshold": _largest,
    "randomk": _chosen,
    "block": _chosen,
    "powersgd": _powersgd,
}


def code(text: str, ranks: int, plain: float, low_rank: Ranked) -> Code:
    """The codec of a plan's `codec=`. plain: bytes of an element that goes as it is."""
    got, found = choice(text), member("codec", text)
    if found is None:
        made = _CODES[got.name](got, ranks, low_rank)
    else:
        ours = found.fidelity is Fidelity.EXACT
        sent = (
            found.work(((_COUNTED,),), 4, ranks).sent * ranks / (2.0 * (ranks - 1) * _COUNTED)
            if ranks > 1
            else 4.0
        )
        made = Code(plain if ours else sent, said="" if ours else found.summary())
    # Error feedback reads and writes what was left, and adds it to the gradient; momentum correction the velocity too.
    extra = 12.0 * len(got.marks)
    return Code(made.sent, made.gathered, made.passes + extra, made.said)


def low_rank(model: Transformer | Network, tp: int) -> Ranked:
    """r -> elements of factors of rank r, and of what is no matrix, beside the elements of a gradient."""

    def share(r: int) -> float:
        matrices, elements = model.matrices(tp)
        whole = sum(rows * columns for rows, columns in matrices)
        rest = max(0.0, elements - whole)
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


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One exchange: bytes of a rank's code, bytes that it sends, seconds on the network and to encode; seconds in which
    memory moves a byte for each element; the network."""

    moved: float
    sent: float
    wire: float
    encode: float
    memory: float
    net: Bus


Spent = tuple[
    float, float, float
]  # bytes that a rank sends, seconds, seconds that show; of a step in the mean


def _met(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    return one.sent, one.wire + one.encode, one.encode + over.beside_backward(one.wire)


def _local(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """Weights (or how far they went) meet after the update, and all wait."""
    h, seconds = int(options["h"]), one.wire + one.encode
    return one.sent / h, seconds / h, seconds / h


def _outer(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """And the outer update reads weights, their last common value and its momentum and writes all three (Douillard et
    al., 2023)."""
    h, seconds = int(options["h"]), one.wire + one.encode + 24.0 * one.memory
    return one.sent / h, seconds / h, seconds / h


def _delayed(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """The whole next step may hide it."""
    return one.sent, one.wire + one.encode, one.encode + over.beside_step(one.wire)


def _gossip(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """Weights go to one peer, while gradients are computed (Lian et al., 2017)."""
    wire = one.net.hops / max(1, one.net.size - 1) + one.moved / one.net.rate
    return one.moved, wire + one.encode, one.encode + over.beside_step(wire)


def _served(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """A server sharded over all ranks: gradients go out while they are computed, weights come back before the next
    step (Li et al., 2014): half the bytes each."""
    half = 0.5 * one.wire
    return one.sent, one.wire + one.encode, one.encode + half + over.beside_backward(half)


def _shared(one: Exchanged, over: Cover, options: Mapping[str, str]) -> Spent:
    """Shared memory: read weights, add to them (Recht et al., 2011)."""
    return 0.0, 12.0 * one.memory, 12.0 * one.memory


# Policies that this version lacks: what they cost, and what they give up.
_POLICIES: Mapping[str, tuple[Callable[[Exchanged, Cover, Mapping[str, str]], Spent], str]] = {
    "delayed": (_delayed, "updates use gradients that are one step old"),
    "local_sgd": (_local, "replicas go {h} steps apart between averages"),
    "diloco": (_outer, "replicas go {h} steps apart between outer steps"),
    "gossip": (_gossip, "replicas average with neighbours alone"),
    "quorum": (_met, "only the first {k} of {dp} replicas count in a step"),
    "ssp": (_served, "weights may be {s} steps old"),
    "async": (_served, "weights are {late} updates old in the mean"),
    "hogwild": (_shared, "ranks write over each other"),
    "adaptive": (_met, "replicas go apart between averages; priced as if they met in every step"),
}


def _policy(plan: Plan) -> tuple[Callable[[Exchanged, Cover, Mapping[str, str]], Spent], str]:
    return _POLICIES.get(choice(plan.sync).name, (_met, ""))


def traffic(
    model: Transformer | Network, plan: Plan, cluster: Cluster, stack: Stack, elements: float, over: Cover
) -> Spent:
    """Of a plan on a cluster. elements: of one rank's gradient."""
    made = code(plan.codec, plan.dp, stack.reduce_bytes, low_rank(model, plan.tp))
    net = bus(cluster, stride(plan, "dp", cluster.order), plan.dp, stack.dp_bus)
    return on_dp(plan, made, net, elements, cluster.device.bandwidth * stack.elementwise, over)


def wired(made: Code, net: Bus, elements: float) -> tuple[float, float]:
    """(bytes that a rank sends, seconds) of one exchange."""
    moved = made.sent * elements
    if made.gathered:
        return (net.size - 1) * moved, net.gather(net.size * moved)
    return net.sent(moved), net.all_reduce(moved)


def on_dp(plan: Plan, made: Code, net: Bus, elements: float, memory: float, over: Cover) -> Spent:
    """elements: of one rank's gradient. memory: bytes/s that elementwise kernels move."""
    sent, wire = wired(made, net, elements)
    one = Exchanged(made.sent * elements, sent, wire, made.passes * elements / memory, elements / memory, net)
    return _policy(plan)[0](one, over, choice(plan.sync).options)


def plain(plan: Plan) -> bool:
    """Whether replicas meet in every step with gradients as they are."""
    codec = member("codec", plan.codec)
    whole = codec is not None and codec.fidelity is Fidelity.EXACT and not choice(plan.codec).marks
    return whole and _policy(plan)[0] is _met


def fidelity(plan: Plan, made: Code | None = None) -> tuple[Fidelity, str]:
    """How close the plan's result is to one device's, and why: as the prover holds it to."""
    found, reasons = fidelity_of(plan), list[str]()
    if plan.dp > 1:
        lost = _policy(plan)[1].format_map(
            {"h": "?", "k": "?", "s": "?"}
            | dict(choice(plan.sync).options)
            | {"dp": plan.dp, "late": plan.dp - 1}
        )
        reasons += [f"sync={plan.sync}: {lost}"] if lost else []
        reasons += [f"codec={plan.codec}: {made.said}"] if made is not None and made.said else []
    if reasons:
        return Fidelity.LOSSY, "; ".join(reasons)
    said = {
        Fidelity.EXACT: "the same bits for any dp, shard and pp",
        Fidelity.ROUNDING: "the same up to the order of summation",
        Fidelity.LOSSY: "sums are not those of one device",
    }
    return found, said[found]

"""What a plan promises, and how far its numbers may be from one device's. No torch.

`docs/proof.md` derives the bound: which sums a plan takes in another order, how far rounding moves a sum of n numbers
(Higham and Mary, 2019), and why a gradient cancels. With u the roundoff, and lambda for one false alarm in 10^9 proofs:

    gradient  lambda * sqrt(path) * u * sqrt(tokens)      where tp, cp or ep cut sums inside a layer
            + lambda * sqrt(4 * leaves) * u * sqrt(leaves)  where micro-batches are added in another order
    loss      the first term without sqrt(tokens): losses are positive, nothing cancels; where terms of two signs do,
              it is relative to what they come to without signs (`Player.watch_sizes`)

`verify/path.py` counts `path`, the additions on the longest way forward and backward. Errors are |a - b| over the
largest |b| of the tensor; a tensor whose entries are all below bound * G, G the largest gradient entry of the model, is
zero but for rounding, and is held to bound * G. After the update, bounds are per element, from the optimiser's own
formula (`verify/laws.py`). Beside that:

- A timetable with two copies of the model (`dualpipe`) adds up half of the micro-batches in each, as `dp=2` does.
- `ep` puts tokens of several ranks into one product of an expert. Which expert a token takes is the same as long as no
  two of its scores are nearer than the error: prove such plans in float64. `tp=RxC` deals samples over rows, so the
  number of tokens counts as part of the path.
- In bf16, matrix products read numbers rounded to 2^-8 but add in float32: sqrt(rounded tensors) * 2^-8 is added.
- There ReLU and its like, whose derivative jumps, may change a gradient by whole terms where layers are cut, so nothing
  is shown: prove such plans in float64.
- A weight that the model reads in float32 has a gradient that is added up in float32 (`path.read_in_float32`):
  lambda * sqrt(2 * tokens) * 2^-24 * sqrt(tokens) more, of that weight alone.
- A gradient that is scattered in int8 (`zero=3:scatter=int8`) is off by at most 1/254 of the largest entry of its
  block, once for each of t parts (of a leaf, on a rank of cp), whose sum is about sqrt(t) times as large as one:
  sqrt(t) / 254 more, with a margin of two. Parameters that are gathered in int8 are held to one device that rounds its
  own alike.
- A codec on `dp` declares how far an element of its sum may be off, over the largest of its parameter (`Codec.lost`).
  With error feedback, what a step did not send comes in a later one, and that is an error of both; such a bound may be
  above 1. What was not sent, and is kept, is proved by the codec's own suite (`verify --conformance`).
- Both take parts to be sqrt(t) times smaller than their sum. Where parts contradict each other they are larger: a plan
  that is outside is held once more to what the parts of that very step come to (`verify/parts.py`).
- Where an optimiser has its first moment cross in the place of gradients, of decay b, the error of the gradient is
  1 / (1 - b) times the codec's; with a margin of two, for a moment may be larger than the gradient.
- What an optimiser observes of layers (`Optimiser.observed`) is compared itself (`Bounds.observed`), and its formula is
  held to it. That it follows from what passes the layers is held to one device (`verify/layer_products.py`).
- Under `precision=bf16:fp8` both sides round alike. What the rounding itself may be is held to one device, product by
  product (`verify/float8.py`).
- Under `precision=bf16:stochastic` both sides draw the same noise, and rounding is monotonic: a parameter lies between
  what the least and the largest value that the formula allows are rounded to, one bf16 number (2^-7) apart at most.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unisono.plan import Plan
from unisono.plan.fidelity import beside_like
from unisono.plan.grammar import member
from unisono.plan.grid import Grid
from unisono.spec.fidelity import Fidelity

FALSE_ALARM = 1e-9
# Of what is added and kept.
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-24, "fp16": 2.0**-24}
ULP = 2.0**-7  # of a bf16 number, from it to its neighbour, at most
INT8 = 1 / 254  # of the largest of a block
FLOAT8 = 2.0**-3  # of what products in eight bits read: gradients, in e5m2
COARSE = 2.0**-10  # roundings from here on may change what a router or a paced learning rate decides
COMPUTE = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # of what matrix products read


@dataclass(frozen=True, slots=True)
class BoundTerms:
    """What the bounds depend on besides the plan.

    path: additions on the longest way forward and backward. rounded: tensors on it that are stored in the compute
    dtype. elements: of all parameters. tokens, leaves: of one global batch. magnified: how much larger what a codec
    loses is in the gradient. narrow: names of weights that the model reads in float32. regrouped: whether a section of
    the recipe orders sums otherwise than one device does. reshaped: whether one has layers compute on tensors of other
    shapes, whose kernels round otherwise. jumps: whether rounding in half precision may change a gradient by a whole
    term (`path.has_jumps`).
    """

    path: int
    rounded: int
    elements: int
    tokens: int
    leaves: int
    magnified: float = 1.0
    narrow: frozenset[str] = frozenset()
    regrouped: bool = False
    reshaped: bool = False
    jumps: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest relative errors. unit: roundoff of sums and of the optimiser. spread: lambda. lost: of `grad`, what a
    codec says that it loses. kept: how far one update's rounding may take two parameters apart that were as good as
    equal, relative to them. more: of the gradients of some weights, by their names, added to `grad`."""

    loss: float
    grad: float
    unit: float
    spread: float
    lost: float = 0.0
    kept: float = 0.0
    more: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return the bound of the gradient of this weight."""
        return self.grad + self.more.get(name, 0.0)

    @property
    def most(self) -> float:
        """The bound of all gradients together."""
        return self.grad + max(self.more.values(), default=0.0)

    @property
    def observed(self) -> float:
        """The bound of means of products of what passes a layer, such as g gᵀ: twice that of a gradient for two of it,
        with a margin of two. No codec touches them."""
        return 4 * (self.most - self.lost) + 64 * self.unit

    @property
    def vote(self) -> float:
        """How far one step may take a whole number that follows from values, such as a router's vote: nowhere, but in
        lower precision from one vote to its opposite, since a token may take another expert."""
        return 2.0 if self.most - self.lost > COARSE else 0.0

    def rate(self, norm: float) -> float:
        """Relative error of a learning rate that follows from a mean of squared gradients over the square of their
        mean, both off by twice the norm's relative error. Such rates lie on a grid of thousandths, so that it takes
        more than the rounding of float64 to move one."""
        return 4 * norm + COARSE if norm > COARSE**2 else 0.0

    @property
    def parts_runs(self) -> bool:
        """Whether a codec may lose half of a gradient or more: then two runs that are right need not stay near each
        other from step to step, and to compare them there shows nothing."""
        return self.lost >= 0.5

    def total(self, terms: int) -> float:
        """Return the bound of a sum of `terms` positive numbers, taken once more in another order."""
        return self.spread * math.sqrt(2 * terms) * self.unit

    def shows_nothing(self, leaves: int) -> bool:
        """Whether the bound has room for half of what one of the step's micro-batches adds to a gradient: then a plan
        that loses it would pass."""
        return self.grad - self.lost > 0.5 / leaves


def bounds_of(plan: Plan, sizes: BoundTerms) -> Bounds:
    """The bounds that `verify` holds one step of a plan to."""
    unit = ROUNDOFF[plan.precision]
    spread = math.sqrt(2 * math.log(2 * max(sizes.elements, 1) / FALSE_ALARM))
    inside = between = 0.0
    if plan.tp * plan.cp * plan.ep > 1 or sizes.reshaped:
        read = FLOAT8 if plan.arithmetic.fp8 else COMPUTE.get(plan.precision, 0.0)
        rounding = read * math.sqrt(sizes.rounded)
        # Rows of a grid have samples of their own, so sums over tokens are cut too.
        path = sizes.path + (sizes.tokens if isinstance(plan.tp, Grid) else 0)
        inside = 1.0 if sizes.jumps else spread * (math.sqrt(path) * unit + rounding)
    outside = replace(plan, tp=1, cp=1, ep=1, codec="plain")
    # The sums of a cut layer enter those over leaves, and a tp rank has its own part of a tied weight.
    if inside or sizes.regrouped or beside_like(outside) is not Fidelity.EXACT:
        between = spread * math.sqrt(4 * sizes.leaves) * unit
    codec = member("codec", plan.codec)
    lossy = plan.dp > 1 and codec.fidelity is Fidelity.LOSSY
    lost = codec.lost(plan.dp) * sizes.magnified if lossy else 0.0
    if plan.wires.scatter and plan.shard > 1:
        lost += 2 * math.sqrt(sizes.leaves * plan.cp) * INT8
    grad = inside * math.sqrt(sizes.tokens) + between * math.sqrt(sizes.leaves)
    kept = ULP if plan.arithmetic.stochastic else 0.0
    narrow = min(1.0, spread * math.sqrt(2) * sizes.tokens * ROUNDOFF["fp32"])
    more = dict.fromkeys(sizes.narrow, narrow) if inside else {}
    return Bounds(min(1.0, inside), min(1.0, grad) + lost, unit, spread, lost, kept, more)


def rhythm_of(plan: Plan) -> int:
    """Steps from one update to the next."""
    policy = member("sync", plan.sync)
    return 1 if policy is None else policy.rhythm


def lag_of(plan: Plan) -> int:
    """Steps from a gradient to its update."""
    policy = member("sync", plan.sync)
    return 0 if policy is None else policy.update_lag


def steps_of(plan: Plan, at: int) -> range:
    """Steps of the run that make step `at` of its proof, which is one update: with `sync=period:4` 8, 9, 10 and 11 make
    step 2. With `sync=delayed:lag=1` 0 and 1 make step 0, and 3 makes step 2."""
    rhythm, lag = rhythm_of(plan), lag_of(plan)
    return range(at * rhythm + (lag if at else 0), (at + 1) * rhythm + lag)


def sources_of(plan: Plan, at: int) -> range:
    """Steps of the run whose gradients make update `at`."""
    rhythm = rhythm_of(plan)
    return range(at * rhythm, (at + 1) * rhythm)

"""A device under a stack of software: seconds of kernels, of collectives, and of what a pass has of both."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grid import Grid, columns_of
from unisono.planner.collectives import ALONE, Bus, Exchange, bus, exchange
from unisono.planner.machines.cluster import Cluster, Device
from unisono.planner.machines.order import stride
from unisono.planner.source import Source
from unisono.planner.stack import Stack
from unisono.planner.work.stage import ITEM, MatrixProduct, PartPass, Transfer
from unisono.spec.errors import UsageError

_TILES = Source("specification", "cuBLAS's largest kernels for half precision")
TILE_ROWS: Annotated[int, _TILES] = 256
TILE_COLUMNS: Annotated[int, _TILES] = 128
_BLENDED = Source("fitted", "vTrain, 2024, 250 single-node rows: of 2, 3, 4, 6 and 12 the least mean error")
_A100 = Source(
    "specification", "312 TFLOP/s in half precision on 108 multiprocessors; NVIDIA A100 data sheet"
)
# FLOP/s of one multiprocessor of the device that stacks' `depth` was fitted on.
UNIT_RATE: Annotated[float, _A100] = 312e12 / 108
# Exponent with which two bounds that are near each other both hurt. Single products do not tell one from another.
BLEND: Annotated[float, _BLENDED] = 4.0


@dataclass(frozen=True, slots=True)
class Chip:
    """A device under a stack, in one dtype: what kernels are priced with.

    rate: FLOP/s; traffic: bytes/s that elementwise kernels reach; item: bytes of an element; efficiency, attention:
    shares of the rate that large products, and fused attention, keep up.
    """

    rate: float
    traffic: float
    item: int
    units: int
    efficiency: float
    depth: float
    wave: float
    attention: float = 1.0


def chip(device: Device, stack: Stack, dtype: str, item: int) -> Chip:
    """A kernel's beginning and end take as long in any dtype and on any device, so `depth`, which is known for half
    precision on an A100, is less where the main loop of one multiprocessor is slower, and more where it is faster."""
    rate = device.flops(dtype)
    pace = rate / device.units / UNIT_RATE if device.units else min(1.0, rate / device.flops("bf16"))
    return Chip(
        rate=rate,
        traffic=device.bandwidth * stack.elementwise,
        item=item,
        units=device.units,
        efficiency=min(1.0, stack.matmul * device.products),
        depth=stack.depth * pace,
        wave=stack.wave,
        attention=min(1.0, stack.attention * device.attention),
    )


def matmul(
    on: Chip, rows: float, inner: float, columns: float, batch: float = 1.0, read: float | None = None
) -> float:
    """Seconds of `batch` products (rows x inner) (inner x columns). read: elements of all the left factors in memory,
    where they are fewer, as a convolution's are.

    Arithmetic at the rate that full tiles reach, less where the last wave leaves multiprocessors idle and where the
    inner dimension is short; memory traffic beside it; the larger of both, softly.
    """
    flops = 2.0 * batch * rows * inner * columns
    share = 1.0
    if on.units:
        # Parts of tiles count as such: rounded up, a row more would fill more units and make a product faster.
        tiles = batch * max(1.0, rows / TILE_ROWS) * max(1.0, columns / TILE_COLUMNS)
        share = tiles / (ceil(tiles / on.units) * on.units)
    compute = flops / (on.rate * on.efficiency * share**on.wave) * (1.0 + on.depth / inner)
    moved = on.item * batch * (rows * inner + inner * columns + rows * columns)
    if read is not None:
        moved -= on.item * (batch * rows * inner - read)
    return soft_max(compute, moved / on.traffic)


def elementwise(on: Chip, moved: float) -> float:
    """Seconds of kernels that read and write `moved` bytes in all."""
    return moved / on.traffic


def soft_max(a: float, b: float) -> float:
    """The larger, and up to a fifth more where both are alike: two bounds that are near each other both hurt."""
    if a <= 0.0 or b <= 0.0:
        return max(a, b)
    return float((a**BLEND + b**BLEND) ** (1.0 / BLEND))


@dataclass(frozen=True, slots=True)
class Traffic:
    """One axis: bytes that a rank sends in a step, seconds that they take, seconds of them that nothing hides. after:
    of these, what gradients show, beside the passes over blocks."""

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    after: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.exposed + other.exposed,
            self.after + other.after,
        )

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(times * self.bytes, times * self.seconds, times * self.exposed, times * self.after)


def joined(first: Mapping[str, Traffic], more: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Add up two mappings by axis."""
    return {axis: first.get(axis, Traffic()) + more.get(axis, Traffic()) for axis in {**first, **more}}


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one pass over one part. arithmetic: matrix products alone, attention: of these. device: all kernels.
    talk: collectives, by axis. host: to start it all. total: what the clock shows."""

    arithmetic: float = 0.0
    device: float = 0.0
    host: float = 0.0
    attention: float = 0.0
    talk: Mapping[str, Traffic] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return soft_max(self.device + sum(traffic.exposed for traffic in self.talk.values()), self.host)

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(
            self.arithmetic + other.arithmetic,
            self.device + other.device,
            self.host + other.host,
            self.attention + other.attention,
            joined(self.talk, other.talk),
        )


@dataclass(frozen=True, slots=True)
class AxisNetworks:
    """Networks of a plan's ranks of tp, cp and ep on a cluster. heads: of an all-to-all over cp. grid: of rows and
    columns of tp."""

    tp: Bus
    cp: Bus
    ep: Exchange
    heads: Exchange
    grid: Mapping[str, Bus] = field(default_factory=dict)

    def of(self, call: Transfer, stack: Stack) -> tuple[float, float]:
        """(bytes that a rank sends for one call, its seconds)."""
        if call.label == "tp":
            net = self.grid.get(call.axis, self.tp)
            return call.sent(net.size), _meeting(call, stack, net)
        if call.axis == "cp":
            far = self.heads.all_to_all if call.op == "all_to_all" else self.cp.gather
            return call.sent(self.cp.size), far(call.nbytes)
        if call.axis == "cut":
            cut = Bus(self.tp.size // self.ep.size, self.tp.rate, self.tp.hops)
            return call.sent(cut.size), cut.gather(call.nbytes)
        if call.op == "dispatch":
            return call.sent(self.ep.size), self.ep.dispatch(call.nbytes, call.copies)
        return call.sent(self.ep.size), self.ep.all_to_all(call.nbytes)


def _meeting(call: Transfer, stack: Stack, net: Bus) -> float:
    """A collective on tp takes some time whatever its bytes, until the last of its ranks is there; half of an
    all-reduce half of that."""
    if call.op == "all_reduce":
        return _late(stack, net.size) + net.all_reduce(call.nbytes)
    return _late(stack, net.size) / 2 + net.gather(call.nbytes)


def _late(stack: Stack, size: int) -> float:
    return stack.collective + stack.member * size if size > 1 else 0.0


def networks(plan: Plan, cluster: Cluster, stack: Stack) -> AxisNetworks:
    """Return the networks of a plan on a cluster."""
    apart = {axis: stride(plan, axis, cluster.order) for axis in ("tp", "cp", "ep")}
    share = stack.tp_bus
    return AxisNetworks(
        bus(cluster, apart["tp"], plan.tp, share),
        bus(cluster, apart["cp"], plan.cp, share),
        exchange(cluster, apart["ep"], plan.ep, share),
        exchange(cluster, apart["cp"], plan.cp, share) if plan.cp > 1 else ALONE,
        _grid(plan, cluster, share) if isinstance(plan.tp, Grid) else {},
    )


def _grid(plan: Plan, cluster: Cluster, share: float) -> dict[str, Bus]:
    """Rows are neighbours; ranks of a column are as far apart as a row is long."""
    sizes = {"row": columns_of(plan.tp), "column": plan.tp // columns_of(plan.tp)}
    return {
        axis: bus(cluster, stride(plan, axis, cluster.order), size, share) for axis, size in sizes.items()
    }


@dataclass(frozen=True, slots=True)
class Timer:
    """What gives a plan's lists of work seconds: a device, its networks, the software on both.
    eight: the device at products of eight bits, if the plan has any."""

    on: Chip
    net: AxisNetworks
    stack: Stack
    eight: Chip | None = None

    def of(self, work: PartPass) -> PassSeconds:
        """Seconds of one pass over one part."""
        on, stack = self.on, self.stack
        scores = self.products(work.scores) + work.fused / (on.rate * on.attention)
        products = self.products(work.products)
        device = products + scores + elementwise(on, work.moved + work.masks) + work.kernels * stack.gap
        host = work.kernels * stack.launch
        if any(call.label == "tp" for call in work.calls):
            host += 2 * _late(stack, self.net.tp.size)
        return PassSeconds(
            products + scores, device, host, scores, self._talk(work.calls, products, scores, device)
        )

    def products(self, products: tuple[MatrixProduct, ...]) -> float:
        """Seconds of matrix products."""
        return sum(
            p.times * matmul(self._multiplies(p), p.rows, p.inner, p.columns, p.many, p.read)
            for p in products
        )

    def _multiplies(self, product: MatrixProduct) -> Chip:
        return self.eight if product.eight and self.eight is not None else self.on

    def _talk(
        self, calls: tuple[Transfer, ...], products: float, scores: float, device: float
    ) -> dict[str, Traffic]:
        """By axis, with what shows of it."""
        traffic: dict[str, Traffic] = {}
        for call in calls:
            axis = "ep" if call.axis == "cut" else call.label
            nbytes, seconds = self.net.of(call, self.stack)
            traffic[axis] = traffic.get(axis, Traffic()) + Traffic(nbytes, seconds) * call.times
        for axis, behind in {
            ("ep" if call.axis == "cut" else call.label): call.behind for call in calls
        }.items():
            whole, cp = traffic[axis].seconds, self.net.cp.size
            # An other micro-batch computes as long as this one (DeepSeek-V3 report, 2024, section 3.2.1).
            hidden = {
                "backward": whole * self.stack.tp_hidden,
                "scores": min(whole, scores * (cp - 1) / cp),
                "other": min(whole, device),
            }.get(behind, 0.0)
            # The first chunk shows, and of the others what products do not hide.
            chunks = max(call.chunks for call in calls if call.label == axis) if axis == "tp" else 1
            hidden = max(hidden, (1 - 1 / chunks) * min(whole, products))
            traffic[axis] = replace(traffic[axis], exposed=whole - hidden)
        return traffic


def timer(plan: Plan, cluster: Cluster, stack: Stack) -> Timer:
    """On a device of the cluster, in the plan's precision. Raises UsageError U-P26 where it asks for products of eight
    bits and the device has no rate of them."""
    eight = None
    if plan.arithmetic.fp8:
        if "fp8" not in cluster.device.peak:
            what = f"precision={plan.text('precision')}: {cluster.device.name} multiplies no numbers of eight bits"
            raise UsageError(
                what, where="plan.precision", fix="precision=bf16, or a device that has fp8", code="P26"
            )
        eight = chip(cluster.device, stack, "fp8", 1)
    on = chip(cluster.device, stack, plan.precision, ITEM[plan.precision])
    return Timer(on, networks(plan, cluster, stack), stack, eight)

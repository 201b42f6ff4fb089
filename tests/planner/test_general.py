"""Networks of parts: published counts, parts that add up, and what moves how."""

from itertools import pairwise

import pytest

from unisono.plan import Plan
from unisono.planner import general
from unisono.planner.clusters import cluster
from unisono.planner.formatting import waterfall
from unisono.planner.general import shared
from unisono.planner.price import price
from unisono.planner.pricing import closed, verdict
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.planner.work.networks import Network, cut, longest_share
from unisono.programs.balance import balance
from unisono.spec.workload import Product, Tables, Workload, WorkPart
from unisono_contrib.models.convnet import convnet
from unisono_contrib.models.convnet.resnet import resnet
from unisono_contrib.models.dlrm import dlrm
from unisono_contrib.models.mlp import mlp

TABLES = dlrm(tables=[1_000_000] * 8, width=64, lookups=4, dense=13, bottom=(512, 256), top=(512, 256))
NETWORKS = {
    "resnet": Network(resnet("50"), states=1),
    "convnet": Network(convnet(image=(3, 32, 32), channels=32, n_layer=6, classes=10), by_weights=True),
    "mlp": Network(mlp(features=64, hidden=(256,) * 6, classes=10), by_weights=True),
    "dlrm": Network(TABLES),
}
WHERE, STACK = cluster("dgx-a100:2"), stack("plain")


@pytest.mark.parametrize(
    ("depth", "parameters", "products"),
    [("50", 25_557_032, 4.09), ("101", 44_549_160, 7.80), ("152", 60_192_808, 11.51)],
)
def test_residual_networks_have_their_counts(depth: str, parameters: int, products: float) -> None:
    """Parameters, and 10^9 multiply-adds of a picture of 224 x 224, as torchvision's documentation prints them."""
    sizes = resnet(depth)
    assert sizes.parameters == parameters
    assert round(sizes.flops / 2e9, 2) == products
    assert len(sizes.blocks) == (int(depth) - 2) // 3


def test_a_recommender_by_hand() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 64 + 512 + 256 + 64
    pairs = 9 * 8 // 2 + 64
    top = pairs * 512 + 512 * 256 + 256 + 512 + 256 + 1
    assert TABLES.parameters == 8 * 1_000_000 * 64 + bottom + top
    assert TABLES.parts[0].flops == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_are_those_of_the_products(name: str) -> None:
    for part in NETWORKS[name].workload.parts:
        assert part.flops == sum(product.flops for product in part.products)


@pytest.mark.parametrize(
    "text", ["dp=8", "shard=8", "shard=8 zero=2", "dp=2 shard=2 pp=3", "pp=3 recompute=full"]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_parts_add_up_to_the_step(name: str, text: str) -> None:
    got = simulate(PlanRequest(NETWORKS[name], Plan.parse(text), WHERE, STACK, 32, 4))
    assert sum(seconds for _, seconds in waterfall(got)) == pytest.approx(got.price.step)
    assert min(got.price.arithmetic, got.price.kernels, got.price.idle, got.price.uneven) >= 0.0
    assert got.price.host >= -1e-9 * got.price.step
    for traffic in got.price.comm.values():
        assert 0.0 <= traffic.exposed <= traffic.seconds * (1 + 1e-9)


def test_more_of_what_costs_costs_more() -> None:
    network = NETWORKS["resnet"]

    def step(text: str, name: str = "dgx-a100:2", micro: int = 64, micros: int = 4) -> float:
        plan = Plan.parse(f"precision=bf16 {text}")
        return price(network, plan, cluster(name), STACK, micro_batch=micro, micros=micros).step

    assert step("dp=8 recompute=full") > step("dp=8") > step("dp=8", micros=2)
    assert step("dp=8", "dgx-v100:2") > step("dp=8") > step("dp=8", "dgx-h100:2")
    assert step("dp=16") > step("dp=8")
    assert step("pp=4") < step("pp=2") < step("dp=1")

    def needed(text: str) -> float:
        plan = Plan.parse(f"precision=bf16 {text}")
        return verdict(PlanRequest(network, plan, WHERE, STACK, 64, 4)).memory.total

    assert needed("shard=8") < needed("shard=8 zero=2") < needed("shard=8 zero=1") < needed("dp=8")
    assert needed("recompute=full") < needed("dp=1")


def test_dealt_tables_cost_an_exchange_and_save_memory() -> None:
    def asked(text: str):
        return simulate(PlanRequest(NETWORKS["dlrm"], Plan.parse(text), WHERE, STACK, 4096, 1))

    whole, dealt = asked("shard=8 zero=1"), asked("shard=8 zero=1 ep=8")
    assert dealt.verdict.memory.params < 0.2 * whole.verdict.memory.params
    assert dealt.verdict.memory.optim == pytest.approx(whole.verdict.memory.optim)
    assert set(dealt.price.comm) == {"ep", "shard"} and "ep" not in whole.price.comm
    # Indices go, what comes out of the tables comes, its gradients go back, but for a rank's own share.
    assert dealt.price.comm["ep"].bytes == pytest.approx((2 * 64 * 4 + 4 * 8) * 4096 * 8 * 7 / 8)
    # A lookup is all memory: no arithmetic, and time with the rows that are read.
    few, many = (
        Network(dlrm(tables=[10**6] * 8, width=64, lookups=n, dense=13, bottom=(8,), top=(8,)))
        for n in (1, 64)
    )
    slow, fast = (price(n, Plan(), WHERE, STACK, micro_batch=4096, micros=1) for n in (many, few))
    assert slow.arithmetic == fast.arithmetic and slow.kernels > 2 * fast.kernels


def test_gradients_of_tables_are_those_of_the_rows_that_were_read() -> None:
    def sent(micro: int) -> float:
        return price(NETWORKS["dlrm"], Plan(dp=8), WHERE, STACK, micro_batch=micro, micros=1).comm["dp"].bytes

    table = 8 * 1_000_000 * 64
    assert sent(16) < sent(1024) < sent(100_000) < 2.1 * 7 / 8 * 4 * (table + 10**6)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_cuts_leave_nothing_out_and_are_the_cheapest(rows: int) -> None:
    network = NETWORKS["resnet"]
    found = cut(network, rows)
    assert [part for row in found for part in row] == list(network.workload.parts)
    costs, first, last = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], 2.0, 1.0
    edges = [0, *(part.stop for part in balance(costs, first, last, rows))]

    def dearest(edges: list[int]) -> float:
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        return max(s + first * (n == 0) + last * (n == len(sums) - 1) for n, s in enumerate(sums))

    def every(done: list[int], left: int):
        if left == 1:
            yield [*done, len(costs)]
            return
        for edge in range(done[-1] + 1, len(costs) - left + 2):
            yield from every([*done, edge], left - 1)

    assert dearest(edges) == min(map(dearest, every([0], rows)))


def test_gradients_are_handed_over_in_every_pass_under_zero_2() -> None:
    network, n, micros = NETWORKS["resnet"], 8, 5

    def sent(zero: int) -> float:
        plan = Plan(shard=n, zero=zero)
        return price(network, plan, WHERE, STACK, micro_batch=4, micros=micros).comm["shard"].bytes

    once = (n - 1) / n * network.workload.parameters * STACK.reduce_bytes
    assert sent(2) - sent(1) == pytest.approx((micros - 1) * once)


def test_gradients_that_meet_are_those_of_one_row() -> None:
    """The first row has the tables, the last one most of the weights: no row has both."""
    tables = WorkPart("tables", 9000, 0, 8, 8, tables=Tables(9000, 80, 8))
    few, many = (WorkPart(f"dense.{n}", n, 2 * n, 8, 8, products=(Product(1, n, 1),)) for n in (100, 5000))
    plan = Plan.parse("dp=2 pp=2")
    for samples, want in ((1, (5000.0, 0.0)), (100, (100.0, 8000.0))):
        found = shared([(tables, few), (many,)], plan, samples)
        assert (found.blocks, found.routed) == want


def test_stages_of_both_ways_sum_the_gradients_of_their_weights() -> None:
    """DualPipe has every weight twice: bytes on pp are those of messages and of one row's gradients."""
    product = (Product(1, 1000, 1000),)
    parts = (WorkPart(str(n), 10**6, 2 * 10**6, 10, 10, products=product) for n in range(6))
    network = Network(Workload(tuple(parts)))
    where, own = cluster("dgx-a100:1"), stack("plain")
    both = price(network, Plan.parse("pp=2 schedule=dualpipe"), where, own, micro_batch=1, micros=4)
    assert both.comm["pp"].bytes == pytest.approx(6 * 10**6 * 4, rel=1e-3)
    assert both.comm["pp"].exposed > 6 * 10**6 * 4 / where.links[0].bandwidth


def test_a_model_that_says_nothing_of_itself_is_one_unit() -> None:
    """As `train` plays a user's module without an anatomy: gathered at once, and not cut."""
    network = NETWORKS["mlp"]
    whole, plan = network.whole, Plan.parse("shard=8")
    assert general.problems(whole, Plan.parse("pp=2")) and not general.problems(whole, plan)
    one, several = (price(each, plan, WHERE, STACK, micro_batch=1, micros=1) for each in (whole, network))
    assert one.arithmetic == pytest.approx(several.arithmetic)
    assert one.comm["shard"].exposed == pytest.approx(one.comm["shard"].seconds)  # nothing computes beside it
    assert one.comm["shard"].bytes == pytest.approx(several.comm["shard"].bytes)


def test_tp_deals_channels_by_their_longest_part() -> None:
    network = NETWORKS["convnet"]
    for part in network.workload.blocks:
        assert part.channels is not None
        half, third = longest_share(part, 2), longest_share(part, 3)
        whole = part.parameters - part.channels.parameters
        assert half.parameters == whole + part.channels.parameters // 2
        # Of eight groups the first of three ranks has three.
        assert third.parameters == whole + part.channels.parameters * 3 // 8
        assert half.flops == sum(p.flops // (2 if p.dealt else 1) for p in part.products)
        assert half.activations == part.activations - part.channels.activations // 2
        assert longest_share(part, 1) == part
    assert longest_share(network.workload.parts[0], 2) == network.workload.parts[0]


@pytest.mark.parametrize("name", ["convnet", "mlp"])
def test_tp_saves_memory_and_sends_its_sums(name: str) -> None:
    def asked(plan: str) -> PlanRequest:
        return PlanRequest(NETWORKS[name], Plan.parse(plan), WHERE, STACK, 64, 1)

    alone, dealt = asked("dp=1"), asked("tp=2")
    before, after = verdict(alone).memory, verdict(dealt).memory
    assert after.params < before.params and after.activations < before.activations
    blocks = [part.channels for part in NETWORKS[name].workload.blocks if part.channels]
    said = sum(own.left + own.entered for own in blocks) * 64 * 4.0
    assert closed(dealt).comm["tp"].bytes == pytest.approx(said)  # of two ranks each sends all of it once


@pytest.mark.parametrize(("name", "tp"), [("resnet", "2"), ("dlrm", "2"), ("convnet", "9"), ("mlp", "2x2")])
def test_tp_that_deals_nothing_has_no_price(name: str, tp: str) -> None:
    assert [one.code for one in general.problems(NETWORKS[name], Plan.parse(f"tp={tp}"))] == ["P12"]

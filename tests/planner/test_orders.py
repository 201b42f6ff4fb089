"""Orders of axes on levels: one place for strides, the usual order as ever, and what another one can and cannot do."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planner.published import gpt
from unisono.cli import main
from unisono.comm.members import Shape, ordered
from unisono.plan import Plan
from unisono.planner.clusters import device
from unisono.planner.collectives import Bus
from unisono.planner.formatting import more_than
from unisono.planner.machines.chip import networks
from unisono.planner.machines.cluster import TOPOLOGIES, Cluster, Link
from unisono.planner.machines.order import USUAL, evenly, stride
from unisono.planner.model_kinds import Model
from unisono.planner.price import price
from unisono.planner.search import search
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.space import Space
from unisono.planner.stack import stack
from unisono.planner.studies import orders
from unisono.planner.work.experts import Experts
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError
from unisono_contrib.models.dlrm import dlrm

DENSE = gpt(24, 16, 2048, 2048)
SPARSE = Transformer(
    16, 16, 2048, 2048, 32000, 16, 5632, bias=False, tied=False, learned=False, gated=True, rms=True,
    experts=Experts(16, 2, 1408),
)  # fmt: skip
TABLES = Network(
    dlrm(tables=(10**6, 10**5), width=64, lookups=1, dense=13, bottom=(64,), top=(64, 64)), states=2
)
ORDERS = st.permutations(USUAL).map(tuple)
SIZES = st.sampled_from([1, 1, 2, 3, 4, 8])
MESHES = st.builds(Plan, tp=SIZES, cp=SIZES, shard=SIZES, dp=SIZES, pp=SIZES)


def two_levels(node: int, world: int, slower: float, topology: str = "switched") -> Cluster:
    inner, outer = Link("inner", node, 100e9, 1e-6), Link("outer", world, 100e9 / slower, 10e-6)
    links = (inner, replace(outer, topology=topology)) if world > node else (inner,)
    return Cluster("two", device("a100-80gb"), world, links)


def step(
    model: Model, plan: Plan, where: Cluster, order: tuple[str, ...], micro_batch: int = 1, micros: int = 8
) -> float:
    ask = PlanRequest(model, plan, replace(where, order=order), stack("plain"), micro_batch, micros)
    return simulate(ask).price.step


# --- strides ---------------------------------------------------------------------------------------------------------


@given(MESHES, st.sampled_from([1, 2, 4, 8, 16]))
def test_the_usual_order_has_the_strides_of_the_contract(plan: Plan, ep: int) -> None:
    assume(ep % plan.tp == 0 or plan.tp % ep == 0)
    plan = replace(plan, ep=ep)
    assert stride(plan, "tp") == 1 and stride(plan, "cp") == plan.tp
    assert stride(plan, "shard") == plan.cp * plan.tp
    assert stride(plan, "dp") == plan.shard * plan.cp * plan.tp
    assert stride(plan, "pp") == plan.dp * plan.shard * plan.cp * plan.tp
    assert stride(plan, "ep") == max(1, plan.tp // ep)


@given(MESHES, ORDERS, st.data())
def test_a_stride_further_is_the_next_on_that_axis_as_train_numbers_ranks(
    plan: Plan, order: tuple[str, ...], data: st.DataObject
) -> None:
    shape = Shape(plan.pp, plan.dp, plan.shard, plan.cp, plan.tp)
    place, axis = data.draw(st.integers(0, plan.world - 1)), data.draw(st.sampled_from(USUAL))
    at, ranks = shape.coordinates(place), ordered(shape, order).ranks
    assume(at[axis] + 1 < getattr(plan, axis))
    further = shape.rank({**at, axis: at[axis] + 1})
    assert ranks[further] - ranks[place] == stride(plan, axis, order)
    assert sorted(ranks) == list(range(plan.world))


@given(MESHES, ORDERS, st.permutations(USUAL))
def test_equal_axes_change_places_and_axes_of_one_rank_have_none(
    plan: Plan, order: tuple[str, ...], other: list[str]
) -> None:
    a, b = other[:2]
    swapped = tuple({a: b, b: a}.get(axis, axis) for axis in order)
    if getattr(plan, a) == getattr(plan, b):
        assert stride(plan, a, order) == stride(plan, b, swapped)
        assert stride(plan, other[2], order) == stride(plan, other[2], swapped)
    alone = [axis for axis in order if getattr(plan, axis) == 1]
    moved = (*(axis for axis in order if axis not in alone), *alone)
    for axis in set(order) - set(alone):
        assert stride(plan, axis, order) == stride(plan, axis, moved)


@pytest.mark.parametrize(
    ("text", "order", "apart"),
    [
        ("tp=2 cp=2 shard=2 ep=8", "tp,cp,shard", 1),
        ("tp=4 shard=4 dp=2 ep=2", "dp,tp,shard", 4),  # dp's two ranks, then every second of tp
        ("shard=8 dp=4 ep=8", "dp,shard", 4),
        ("tp=2 shard=4 dp=2 ep=4", "tp,dp,shard", None),
        ("tp=2 shard=4 dp=2 ep=4", "dp,tp,shard", 2),
        ("tp=2 shard=4 dp=2 ep=2", "tp,dp,shard", 1),
    ],
)
def test_experts_lie_where_the_axes_that_they_re_use_lie(text: str, order: str, apart: int | None) -> None:
    plan, axes = Plan.parse(text), orders.read(order)
    assert evenly(plan, axes) == (apart is not None)
    if apart is not None:
        assert stride(plan, "ep", axes) == apart


# --- prices ----------------------------------------------------------------------------------------------------------


@st.composite
def asked(draw: st.DrawFn) -> PlanRequest:
    """A plan of up to four axes on a cluster of two levels, of any topology."""
    model = draw(st.sampled_from([DENSE, SPARSE, TABLES]))
    pick = st.sampled_from([1, 2, 4])
    free = isinstance(model, Network)
    tp, cp = (1, 1) if free else (draw(pick), draw(st.sampled_from([1, 2])))
    shard, dp, pp = draw(pick), draw(pick), draw(st.sampled_from([1, 2]))
    ranks = tp * cp * shard
    ep = 1 if model is DENSE else draw(st.sampled_from([e for e in (1, 2, 4, 8) if ranks % e == 0]))
    plan = Plan(
        tp=tp, cp=cp, shard=shard, dp=dp, pp=pp, ep=ep, zero=draw(st.sampled_from([1, 2, 3])), precision="bf16",
        cp_kind=draw(st.sampled_from(["ring", "ulysses"])), recompute=draw(st.sampled_from(["none", "full"])),
        schedule=draw(st.sampled_from(["1f1b", "zb1p"])),
    )  # fmt: skip
    kind = draw(st.sampled_from(TOPOLOGIES))
    node = draw(st.sampled_from([2, 4, 8]))
    where = two_levels(min(node, plan.world), plan.world, draw(st.sampled_from([1.0, 4.0, 50.0])), kind)
    return PlanRequest(
        model, plan, where, stack("plain"), draw(st.sampled_from([1, 4])), draw(st.sampled_from([1, 8]))
    )


@given(asked(), st.permutations(USUAL))
@settings(max_examples=150, deadline=None)
def test_orders_that_cross_the_same_levels_in_the_same_ways_are_one(
    ask: PlanRequest, order: list[str]
) -> None:
    plan, own = ask.plan, tuple(order)
    few = orders.distinct(ask)
    assert few[0][0].cluster.order == USUAL
    assume(evenly(plan, own) and not any(orders.uneven(plan, ask.cluster, own)))
    cost = simulate(orders.under(ask, own)).price
    assert cost in [simulate(other).price for other, _ in few]


@given(asked())
@settings(max_examples=30, deadline=None)
def test_the_usual_order_named_is_the_usual_order(ask: PlanRequest) -> None:
    named = orders.under(ask, orders.read("tp,cp,shard,dp,pp"))
    assert named == ask and simulate(named).price == simulate(ask).price
    bare = orders.read(USUAL[0])
    assert bare == USUAL


@given(asked(), st.permutations(USUAL))
@settings(max_examples=50, deadline=None)
def test_on_one_flat_level_every_order_costs_the_same(ask: PlanRequest, order: list[str]) -> None:
    flat = replace(ask, cluster=two_levels(ask.plan.world, ask.plan.world, 1.0))
    assume(evenly(ask.plan, tuple(order)))
    assert simulate(orders.under(flat, tuple(order))).price == simulate(flat).price
    assert [one.cluster.order for one, _ in orders.distinct(flat)] == [USUAL]
    assert orders.describe_best([simulate(flat)]) == ({"order": {"quicker": None}}, "")


def test_two_axes_on_two_levels_by_hand() -> None:
    """Two devices in a node at 100 GB/s and 1 us, four nodes at 10 GB/s and 10 us."""
    where, made = two_levels(2, 8, 10.0), stack("plain")
    plan = Plan.parse("tp=2 dp=4 precision=bf16")
    inside = price(DENSE, plan, where, made, micro_batch=1, micros=1).comm
    turned = replace(where, order=orders.read("dp,tp"))
    across = price(DENSE, plan, turned, made, micro_batch=1, micros=1).comm
    assert networks(plan, where, made).tp == Bus(2, 100e9 * made.tp_bus, 1e-6)
    assert networks(plan, turned, made).tp == Bus(2, 10e9 * made.tp_bus, 10e-6)
    # Four replicas in four nodes: three hops there, each way, and one card for a ring.
    sent = inside["dp"].bytes
    assert inside["dp"].seconds == pytest.approx(2 * 3 * 10e-6 + sent / (10e9 * made.dp_bus))
    # Two in each of two nodes: a hop in the node, one between nodes, and the cards of both.
    assert across["dp"].bytes == sent
    assert across["dp"].seconds == pytest.approx(2 * (1e-6 + 10e-6) + sent / (20e9 * made.dp_bus))
    assert across["tp"].seconds > 5 * inside["tp"].seconds
    ask = PlanRequest(DENSE, plan, where, made, 1, 1)
    told = orders.describe(simulate(orders.under(ask, orders.read("dp"))))[0]["order"]
    assert told["levels"]["tp"] == {"ranks": 2, "apart": 4, "ways": {"outer": 2}}
    assert told["levels"]["dp"] == {"ranks": 4, "apart": 1, "ways": {"inner": 2, "outer": 2}}


@given(
    st.sampled_from([(2, 4, 8), (4, 4, 4), (8, 8, 1), (8, 1, 8), (2, 32, 1), (4, 2, 8), (8, 4, 2)]),
    st.sampled_from([10.0, 30.0, 100.0]),
    st.sampled_from([8, 32]),
)
@settings(max_examples=25, deadline=None)
def test_over_a_slow_outer_link_tp_outside_never_beats_tp_inside(
    sizes: tuple[int, int, int], slower: float, micros: int
) -> None:
    """Of transformers with more tokens in a step of a replica than a few times their width: see the next test."""
    tp, dp, pp = sizes
    plan, where = Plan(tp=tp, dp=dp, pp=pp, precision="bf16"), two_levels(8, 64, slower)
    inside = min(
        step(DENSE, plan, where, ("tp", *rest, "cp", "shard"), 2, micros)
        for rest in permutations(("dp", "pp"))
    )
    for order in permutations(("tp", "dp", "pp")):
        got = step(DENSE, plan, where, (*order, "cp", "shard"), 2, micros)
        assert got >= inside * (1 - 1e-9)
        if where.levels(stride(plan, "tp", (*order, "cp", "shard")), plan.tp)[1] > 1:
            assert got > 1.05 * inside


def test_where_weights_are_more_than_activations_another_axis_belongs_inside() -> None:
    """ZeRO-3 gathers all weights for a micro-batch of few tokens: more bytes than what tp sums."""
    wide = gpt(8, 64, 8192, 128)
    plan = Plan.parse("tp=8 shard=8 zero=3 precision=bf16")
    found = orders.compared(PlanRequest(wide, plan, two_levels(8, 64, 20.0), stack("plain"), 1, 4))
    best = orders.best(found)
    assert best is not found[0] and best.request.cluster.order[:2] == ("shard", "tp")
    assert orders.gain(best, found[0]) > 0.1
    more = more_than(best, found[0])
    assert more["exposed on shard"] < 0.0 < more["exposed on tp"]


def test_stages_in_a_node_send_over_its_links() -> None:
    """And the event simulation plays those messages."""
    plan, where = Plan.parse("pp=8 dp=8 precision=bf16"), two_levels(8, 64, 100.0)
    ask = PlanRequest(DENSE, plan, where, stack("plain"), 4, 8)
    near, far = simulate(orders.under(ask, orders.read("pp"))).price, simulate(ask).price
    assert near.comm["pp"].bytes == far.comm["pp"].bytes
    assert near.comm["pp"].exposed < 0.1 * far.comm["pp"].exposed
    assert near.comm["dp"].seconds > far.comm["dp"].seconds


@given(asked())
@settings(max_examples=20, deadline=None)
def test_all_orders_are_compared_and_another_is_best_where_it_is_quicker(ask: PlanRequest) -> None:
    found = orders.compared(ask)
    usual, steps = found[0], [one.price.step for one in found]
    assert usual.price == simulate(ask).price
    if orders.best(found) is usual:
        assert min(steps) > (1 - orders.WORTH) * steps[0]
    else:
        assert orders.best(found).price.step == min(steps) <= (1 - orders.WORTH) * steps[0]
    for one in found:
        gap = one.price.step - usual.price.step
        # Parts under a thousandth of a millionth of a step are not told.
        assert sum(more_than(one, usual).values()) == pytest.approx(gap, abs=1e-8 * max(steps))
        assert one.verdict.memory == usual.verdict.memory


def test_groups_that_lie_unevenly_are_named_and_never_called_best() -> None:
    plan, where = Plan.parse("tp=2 dp=3 pp=4 precision=bf16"), two_levels(8, 24, 10.0)
    dp_first = orders.read("dp,tp,pp")
    assert ("dp", "inner") in list(orders.uneven(plan, where, dp_first))
    assert not any(orders.uneven(plan, where, orders.read("tp,pp,dp")))
    ask = PlanRequest(DENSE, plan, where, stack("plain"), 1, 8)
    for other, _ in orders.distinct(ask)[1:]:
        assert not any(orders.uneven(plan, where, other.cluster.order))
    answer = simulate(orders.under(ask, dp_first))
    _, text = orders.describe(answer)
    assert "groups of dp lie unevenly over inner" in text


@pytest.mark.parametrize(
    ("model", "plan"), [(SPARSE, "shard=8 dp=8 ep=8 zero=1"), (TABLES, "shard=8 dp=8 ep=8")]
)
def test_experts_and_tables_cross_what_their_axes_cross(model: Model, plan: str) -> None:
    ask = PlanRequest(
        model, Plan.parse(f"{plan} precision=bf16"), two_levels(8, 64, 20.0), stack("plain"), 8, 1
    )
    near = simulate(ask).price.comm["ep"]
    far = simulate(orders.under(ask, orders.read("dp,shard"))).price.comm["ep"]
    assert far.bytes == near.bytes and far.seconds > 10 * near.seconds


def test_an_order_that_is_hardly_quicker_is_not_called_best() -> None:
    """The usual one stays until another is quicker by a hundredth."""
    plan, where = Plan.parse("pp=8 dp=8 precision=bf16"), two_levels(8, 64, 100.0)
    usual, other, *_ = orders.compared(PlanRequest(DENSE, plan, where, stack("plain"), 4, 8))
    step = usual.price.step
    near, far = (replace(other, price=replace(other.price, step=share * step)) for share in (0.995, 0.985))
    assert orders.best([usual, near]) is usual and orders.best([usual, far]) is far


# --- plan ------------------------------------------------------------------------------------------------------------


def best_of(where: Cluster, model: Transformer, batch: int, held: str) -> Space:
    return Space(model, where, stack("plain"), batch, None, Plan.parse(held), lambda plan: True, False)


def test_plan_names_an_order_only_where_it_is_quicker_than_its_best() -> None:
    wide = gpt(8, 64, 8192, 128)
    found = search(best_of(two_levels(8, 64, 20.0), wide, 32, "tp=8 shard=8 zero=3 precision=bf16")).best
    facts, said = orders.describe_best(found)
    other = facts["order"]["quicker"]
    assert other["gain"] >= orders.WORTH and other["axes"][0] == "shard"
    assert "quicker" in said and "--launch.order shard,tp" in said
    asked = next(one.request for one in found if str(one.request.plan) == other["plan"])
    turned = simulate(orders.under(asked, orders.read(",".join(other["axes"]))))
    assert turned.price.step == other["step_s"] and turned.verdict.fits
    alike = search(best_of(two_levels(8, 64, 20.0), DENSE, 512, "tp=8 dp=8 precision=bf16")).best
    assert orders.describe_best(alike)[0]["order"]["quicker"] is None
    assert orders.describe_best(alike)[1].startswith("no other order")


# --- the command -----------------------------------------------------------------------------------------------------

GPT = (
    "--model.kind gpt --model.n_layer 24 --model.n_head 16 --model.d_model 2048 --model.context 1024"
    " --model.vocab 51200 --train.global_batch 256"
).split()
PLAN = ["--plan", "dp=4 tp=4 pp=4 precision=bf16 micros=16"]


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    code = main(["simulate", *GPT, *words, "--json"])
    return json.loads(capsys.readouterr().out) | {"code": code}


def test_the_command_says_which_order_it_is_and_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    on = [*PLAN, "--cluster", "dgx-a100:8"]
    plain, usual = said(on, capsys), said([*on, "--order", "tp,dp"], capsys)
    assert plain["code"] == 0 and plain == usual
    assert plain["order"]["axes"] == ["tp", "dp", "pp"]
    assert plain["order"]["levels"]["dp"]["ways"] == {"nvlink": 2, "infiniband": 2}
    turned = said([*on, "--order", "dp,pp"], capsys)
    assert turned["order"]["axes"] == ["dp", "pp", "tp"]
    assert turned["step_s"] > plain["step_s"] and turned["mem_gib"] == plain["mem_gib"]
    assert turned["comm"]["tp"]["exposed_s"] > plain["comm"]["tp"]["exposed_s"]
    assert main(["simulate", *GPT, *on, "--order", "dp,pp"]) == 0
    page = capsys.readouterr().out
    assert "--launch.order dp,pp,tp plays it" in page


def test_best_prices_all_orders_and_shows_why(capsys: pytest.CaptureFixture[str]) -> None:
    on = [*PLAN, "--cluster", "dgx-a100:8", "--order", "best"]
    got = said(on, capsys)
    rows = got["order"]["orders"]
    assert len(rows) > 1 and [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    usual = next(row for row in rows if row["axes"] == ["tp", "dp", "pp"])
    assert usual["gain"] == 0.0 and usual["more_s"] == {}
    chosen = rows[0] if rows[0]["gain"] >= orders.WORTH else usual
    assert got["step_s"] == chosen["step_s"] and got["order"]["axes"] == chosen["axes"]
    assert main(["simulate", *GPT, *on]) == 0
    page = capsys.readouterr().out
    assert f"{len(rows)} differ here" in page and "what is more or less" in page


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--cluster", "dgx-a100:8", "--order", "tp,ddp"], "did you mean dp"),
        (["--cluster", "dgx-a100:8", "--order", "tp,dp,tp"], "tp is named twice"),
        (["--cluster", "dgx-a100:8", "--order", ""], "no axis is called"),
        (["--cluster", "dgx-a100:8", "--order", "ep,tp"], "no place of its own"),
        (["--cluster", "dgx-a100:4+dgx-v100:4", "--order", "tp"], "--order: on a mixture"),
        (["--cluster", "dgx-a100:8", "--order", "best", "--sweep", "devices=8..64"], "--order"),
    ],
)
def test_mistakes_have_a_remedy(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = said([*PLAN, *words], capsys)
    assert got["code"] == got["exit"] == 2, got
    assert hint in got["what"] + got["try"]


def test_experts_apart_are_refused() -> None:
    apart = PlanRequest(
        SPARSE, Plan.parse("tp=2 dp=2 shard=2 ep=4"), two_levels(4, 8, 10.0), stack("plain"), 1, 1
    )
    with pytest.raises(UsageError, match="side by side"):
        orders.under(apart, orders.read("tp,dp,shard"))

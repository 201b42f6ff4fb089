"""How techniques of real systems are priced, each as a property: states over shard x cp, what hides what, dispatch."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner import memory
from unisono.planner.clusters import cluster
from unisono.planner.collectives import exchange
from unisono.planner.machines.cluster import Cluster
from unisono.planner.price import price
from unisono.planner.price_parts import Price
from unisono.planner.replicas import Cover
from unisono.planner.search import search
from unisono.planner.space import Space
from unisono.planner.stack import stack
from unisono.planner.work.experts import Experts
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

LONG = gpt(32, 32, 4096, 65536, noisy=False)
SHORT = gpt(32, 32, 4096, 2048, noisy=False)
SPARSE = replace(SHORT, experts=Experts(64, 8, 1024))


def priced(
    text: str, model: Transformer = SHORT, micros: int = 4, where: Cluster | None = None, named: str = "plain"
) -> Price:
    plan = Plan.parse(f"precision=bf16 {text}")
    return price(model, plan, where or cluster("dgx-h100:8"), stack(named), micro_batch=1, micros=micros)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("named", ["plain", "megatron-2024"])
def test_memory_is_flat_in_cp_at_fixed_tokens_of_a_device(zero: int, named: str) -> None:
    """Twice the context on twice the ranks of cp, with half the ranks of shard: cp's ranks deal out the states too."""
    each = []
    for cp in (1, 2, 4, 8):
        model = replace(LONG, context=8192 * cp, rows=65536)
        plan = Plan.parse(f"precision=bf16 shard={32 // cp} cp={cp} zero={zero} recompute=full")
        got = memory.of_row(model, plan, stack(named), micro_batch=1, micros=4, row=0)
        each.append(got)
    for one in each[1:]:
        for part in ("params", "grads", "optim", "total"):
            assert getattr(one, part) == pytest.approx(getattr(each[0], part), rel=1e-9), part


def test_experts_are_dealt_to_all_ranks_that_hold_them() -> None:
    plans = [Plan.parse(f"precision=bf16 shard={16 // cp} cp={cp} ep=4 zero=2") for cp in (1, 2, 4)]
    got = [
        memory.of_row(SPARSE, plan, stack("plain"), micro_batch=1, micros=1, row=0).optim for plan in plans
    ]
    assert got == pytest.approx([got[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_of_cp_send_the_states_as_ranks_of_shard_do(zero: int) -> None:
    """The same ranks hold the same parts, so the same bytes cross, whichever axis they are called by."""
    sent = [priced(f"shard={32 // cp} cp={cp} zero={zero}").comm["shard"].bytes for cp in (1, 2, 4)]
    assert sent == pytest.approx([sent[0]] * 3, rel=1e-9)


def test_weights_on_their_way_back_hide_behind_the_next_forward_pass() -> None:
    """zero=1: software that hides all it can shows none of them where a forward pass is longer; that hides none, all."""
    many = replace(stack("plain"), dp_hidden=1.0)
    where, plan = cluster("dgx-h100:1"), Plan.parse("precision=bf16 shard=8 zero=1")

    def shown(hidden: float, size: int) -> float:
        return (
            price(SHORT, plan, where, replace(many, dp_hidden=hidden), micro_batch=size, micros=1)
            .comm["shard"]
            .exposed
        )

    alone = shown(0.0, 1)
    assert alone == pytest.approx(
        price(SHORT, plan, where, many, micro_batch=1, micros=1).comm["shard"].seconds
    )
    assert shown(1.0, 16) == 0.0 < shown(1.0, 1) < alone
    # A pass hides no more than it takes, forward or backward.
    over = Cover(forward=1.0, backward=2.0, hidden=1.0)
    assert (over.beside_forward(1.5), over.beside_backward(1.5)) == (0.5, 0.0)


def test_with_several_stages_on_a_rank_the_first_that_are_done_hide_behind_the_others() -> None:
    one = Cover(forward=1.0, backward=2.0, hidden=1.0)
    two = replace(one, stages=2, ahead=4.0)
    # More fits, but the last stage's own half still has half a pass alone.
    assert one.beside_backward(5.0) == 3.0 and two.beside_backward(5.0) == pytest.approx(1.5)
    assert two.beside_backward(2.0) == 0.0
    assert two.beside_backward(20.0) == pytest.approx(15.0)  # five half passes of one second
    shown = [
        priced(f"dp=8 pp=8 schedule={name}", micros=8).comm["dp"].exposed
        for name in ("1f1b", "interleaved:v=4")
    ]
    assert shown[1] < shown[0]


def test_what_every_pass_hands_over_hides_behind_the_whole_of_it() -> None:
    """zero=2: the gradients of all stages of a rank, behind the passes of all of them."""
    shown = [
        priced(
            f"shard=8 zero=2 pp=4 schedule={name}",
            micros=8,
            named="megatron-2024",
            where=cluster("dgx-h100:4"),
        ).comm["shard"]
        for name in ("1f1b", "interleaved:v=2", "interleaved:v=4")
    ]
    assert [one.seconds for one in shown] == pytest.approx([shown[0].seconds] * 3)
    assert shown[0].exposed >= shown[1].exposed >= shown[2].exposed


def test_a_token_goes_once_to_each_node() -> None:
    """Of many experts to a token several are on one node; its card carries the token once, whoever it is for."""
    net, inside = exchange(cluster("dgx-h100:4"), 1, 32), exchange(cluster("dgx-h100:1"), 1, 8)
    tokens = 1e8
    for copies in (1, 2, 4, 8):
        direct = net.all_to_all(copies * tokens)
        assert net.dispatch(copies * tokens, copies) <= direct * (1 + 1e-12)
        assert inside.dispatch(copies * tokens, copies) == pytest.approx(inside.all_to_all(copies * tokens))
    assert net.dispatch(tokens, 1) == net.all_to_all(tokens)
    # With ever more copies all nodes get each token: 3 of 4 of them over the cards, however many experts it has.
    far = net.dispatch(64 * tokens, 64) - net.hops
    card, rail = net.reach[1][2], net.reach[0][2]
    assert far == pytest.approx(max(3 * tokens / card, 7 / 8 * 64 * tokens / rail), rel=1e-6)
    few, more = (priced("shard=32 ep=32", replace(SPARSE, experts=Experts(64, k, 1024)), where=cluster("dgx-h100:4"))
                 .comm["ep"].seconds for k in (2, 8))  # fmt: skip
    assert few < more < 4 * few


def test_chunks_of_tp_show_the_first_and_what_products_do_not_hide() -> None:
    got = [priced(f"tp=8:chunks={n}" if n > 1 else "tp=8", LONG, named="plain") for n in (1, 2, 4, 16)]
    tp = [one.comm["tp"] for one in got]
    assert [one.bytes for one in tp] == pytest.approx([tp[0].bytes] * 4, rel=1e-9)
    assert all(a.seconds < b.seconds for a, b in pairwise(tp))  # more messages
    for one, chunks in zip(tp, (1, 2, 4, 16), strict=True):
        assert one.exposed >= one.seconds / chunks * (1 - 1e-9)
    assert tp[1].exposed < tp[0].exposed


def test_the_planner_takes_chunks_where_they_pay_and_leaves_what_is_held() -> None:
    def best(held: str, model: Transformer) -> Plan:
        asked = Space(model, cluster("dgx-a100:2"), stack("plain"), 64, None, Plan.parse(held))
        return search(asked, top=1).best[0].request.plan

    wide = gpt(32, 32, 4096, 4096, noisy=False)
    assert best("pp=1 shard=1 dp=2 precision=bf16", wide).chunks > 1
    assert best("tp=8 dp=2 precision=bf16", wide).chunks == 1


def test_products_of_eight_bits_take_a_devices_rate_of_them_and_are_refused_without() -> None:
    wide = gpt(8, 64, 8192, 4096, noisy=False)

    def seconds(text: str, where: str) -> float:
        plan = Plan.parse(text)
        return price(wide, plan, cluster(where), stack("plain"), micro_batch=4, micros=2).step

    eight, half = (seconds(f"dp=8 precision=bf16{more}", "dgx-h100") for more in (":fp8", ""))
    assert 0.5 < eight / half < 0.95
    with pytest.raises(UsageError, match="eight bits") as refused:
        seconds("dp=8 precision=bf16:fp8", "dgx-a100")
    assert refused.value.code == "P26"

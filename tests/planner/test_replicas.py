"""Codecs and policies on dp: bytes of their formats, order between them, and fidelity said."""

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.plan.grammar import known
from unisono.planner import replicas
from unisono.planner.clusters import cluster
from unisono.planner.collectives import Bus
from unisono.planner.simulate import Question, simulate
from unisono.planner.stack import stack
from unisono.spec.fidelity import Fidelity

MODEL = gpt(24, 16, 2048, 1024)
SPELT = {"cast": "cast:bf16", "topk": "topk:ratio=0.01", "powersgd": "powersgd:r=4"}
POLICIES = {"local_sgd": "local_sgd:h=8", "diloco": "diloco:h=8", "quorum": "quorum:k=14", "ssp": "ssp:s=2"}


def dp(words: str, ranks: int = 16):
    plan = Plan.parse(f"dp={ranks} precision=bf16 {words}".strip())
    where = cluster("dgx-a100:8")
    return simulate(Question(MODEL, plan, where, stack("megatron-2022"), 4, 4)).price.comm["dp"]


@pytest.mark.parametrize("name", [name for name in known("codec") if name != "plain"])
def test_every_codec_of_the_grammar_sends_less(name: str) -> None:
    got, whole = dp(f"codec={SPELT.get(name, name)}"), dp("")
    assert 0.0 < got.bytes < whole.bytes
    assert got.exposed <= got.seconds * (1 + 1e-12)
    made = replicas.code(SPELT.get(name, name), 16, 4.0, replicas.low_rank(MODEL, 1))
    assert made.said and made.passes > 0.0


def test_bytes_are_those_of_the_formats() -> None:
    whole = dp("").bytes  # in fp32, by an all-reduce
    assert dp("codec=cast:bf16").bytes == pytest.approx(whole / 2)
    assert dp("codec=sign").bytes == pytest.approx(whole / 32)
    assert dp("codec=randomk:ratio=0.01").bytes == pytest.approx(whole / 100)
    # 15 others' pairs of 6 bytes, against twice 15/16 of 4 bytes.
    assert dp("codec=topk:ratio=0.01").bytes == pytest.approx(whole * 0.01 * 15 * 6 / (2 * 15 / 16 * 4))
    assert dp("sync=local_sgd:h=8").bytes == pytest.approx(whole / 8)


def test_gathered_codes_cost_more_than_plain_with_enough_ranks() -> None:
    """All-gathering pairs of 6 bytes pays no more once ratio > 8 / (n * 6) (Agarwal et al., 2022)."""
    made = replicas.code("topk:ratio=0.01", 100, 4.0, replicas.low_rank(MODEL, 1))
    sent = [replicas.wired(made, Bus(n, 1e9, 0.0), 1e6)[0] / (2 * (n - 1) / n * 4e6) for n in (100, 132, 135)]
    assert sent[0] < 1.0 < sent[2] and sent[1] == pytest.approx(1.0, rel=0.02)


def test_rank_and_marks() -> None:
    share = replicas.low_rank(MODEL, 1)
    assert share(1) < share(4) < share(64) < share(10_000) == pytest.approx(1.0)
    bare, fed = (replicas.code(f"topk:ratio=0.01{mark}", 8, 4.0, share) for mark in ("", "+ef"))
    assert fed.sent == bare.sent and fed.passes > bare.passes


@pytest.mark.parametrize("name", [n for n in known("sync") if n not in ("every_step", "canonical")])
def test_every_policy_of_the_grammar_has_a_price_and_is_lossy(name: str) -> None:
    words = f"sync={POLICIES.get(name, name)}"
    got, whole = dp(words), dp("")
    assert 0.0 <= got.bytes <= whole.bytes and got.exposed >= 0.0
    fidelity, why = replicas.fidelity(Plan.parse(f"dp=16 {words}"))
    assert fidelity is Fidelity.LOSSY and name in why


def test_less_talk_shows_less() -> None:
    exposed = [dp(f"sync={how}").exposed for how in ("every_step", "local_sgd:h=4", "local_sgd:h=64")]
    assert exposed == sorted(exposed, reverse=True)
    assert dp("sync=diloco:h=64").exposed > dp("sync=local_sgd:h=64").exposed


def test_what_overlaps_by_design_does_so_on_any_stack() -> None:
    """megatron-2022 does not hide gradients behind backward; policies that talk during the next step hide there."""
    assert dp("").exposed == dp("").seconds
    assert (
        dp("sync=delayed").exposed < 0.3 * dp("").exposed and dp("sync=gossip").exposed < 0.3 * dp("").exposed
    )


def test_fidelity_of_exact_ways() -> None:
    assert replicas.fidelity(Plan.parse("dp=4"))[0] is Fidelity.ROUNDING
    assert replicas.fidelity(Plan.parse("dp=4 sync=canonical"))[0] is Fidelity.EXACT

"""Gradients that meet on hosts of shared cores: named algorithms and codecs have a price of what was measured."""

from dataclasses import replace

import pytest

from tests.planner.test_host import BACKWARD, FORWARD, HOST, MODEL, MODELS, here, priced
from unisono.comm.collectives import COLLECTIVES
from unisono.plan import Plan
from unisono.planner.machines.host import Pace
from unisono.planner.simulate import Question, simulate
from unisono.planner.stack import stack
from unisono.planner.work.calls import calls

PROGRAMS = tuple(name for name in COLLECTIVES.names() if hasattr(COLLECTIVES.find(name), "program"))
CODECS = ("cast:bf16", "int8", "int8+ef", "int4+ef", "sign+ef", "qsgd", "topk:ratio=0.01+ef", "powersgd:r=4+ef",
          "randomk:ratio=0.1", "block:ratio=0.1", "threshold:ratio=0.02+ef")  # fmt: skip


def dp(text: str, ranks: int = 2, megabits: float = 0.0, host=HOST, model: str = "gpt"):
    return priced(f"dp={ranks} {text}", here(host, ranks, megabits), model=model)


@pytest.mark.parametrize(
    "text", [*(f"collective={name}" for name in PROGRAMS), *(f"codec={name}" for name in CODECS)]
)
def test_each_has_a_price_that_a_slower_wire_never_lowers(text: str) -> None:
    for ranks in (2, 4):
        steps = [dp(text, ranks, rate).step for rate in (0.0, 1000.0, 100.0, 10.0)]
        assert steps == sorted(steps) and steps[0] > 0
        got = dp(text, ranks)
        assert got.comm["dp"].bytes > 0 and got.comm["dp"].exposed > 0
    asked = Plan.parse(f"dp=2 {text}")
    answer = simulate(Question(MODEL, asked, here(ranks=2), stack("plain-cpu"), 4, 1))
    assert answer.price.step > 0, "it is not refused"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model", MODELS)
def test_what_a_codec_sends_is_what_the_ledger_counts(codec: str, model: str) -> None:
    plan = Plan.parse(f"dp=4 codec={codec}")
    ledger = sum(
        call.times * call.sent(4)
        for call in calls(MODELS[model], plan, 4, 1)
        if call.axis == "dp" and call.nbytes > 64
    )
    assert dp(f"codec={codec}", 4, model=model).comm["dp"].bytes == pytest.approx(ledger, rel=0.02)


def test_where_the_wire_is_the_limit_fewer_bytes_are_quicker_and_kernels_are_not_for_nothing() -> None:
    slow = {
        codec: dp(f"codec={codec}", 2, 10.0).step for codec in ("plain", "cast:bf16", "int8+ef", "int4+ef")
    }
    assert list(slow.values()) == sorted(slow.values(), reverse=True)
    assert slow["int8+ef"] < 0.5 * slow["plain"]
    dear = replace(HOST, forward=replace(FORWARD, elementwise=100 * FORWARD.elementwise))
    more = [dp(f"codec={codec}", host=dear).comm["dp"].exposed for codec in ("plain", "int8+ef")]
    assert more[1] > 2 * more[0]


def test_rounds_cost_waits_and_bytes_cost_work() -> None:
    """A ring of n ranks has 2 (n - 1) rounds, direct has two; both send the same bytes."""
    idle = replace(HOST, forward=Pace(*[0.0] * 8), backward=BACKWARD)
    ring, direct = (dp(f"collective={name}", 4, host=idle).comm["dp"] for name in ("ring", "direct"))
    assert ring.bytes == pytest.approx(direct.bytes, rel=0.01)
    wait = HOST.wait("message", 2)
    assert ring.exposed - direct.exposed >= 3 * wait, "four rounds more, in each bucket"
    tree = dp("collective=tree", 4, host=idle).comm["dp"]
    assert tree.bytes > 1.3 * ring.bytes


def test_twice_the_pace_of_all_that_was_measured_is_twice_the_price() -> None:
    def slower(pace: Pace) -> Pace:
        return Pace(*(2 * part for part in (pace.product, pace.attention, pace.elementwise, pace.logits, pace.weights,
                                            pace.noise, pace.launch, pace.convolution)))  # fmt: skip

    bare = replace(HOST, calls={}, copies={})
    curves = {key: replace(c, seconds=tuple(2 * s for s in c.seconds)) for key, c in HOST.curves.items()}
    twice = replace(bare, forward=slower(FORWARD), backward=slower(BACKWARD), curves=curves)
    for text in ("collective=ring", "codec=int8+ef", "codec=int8 collective=ring"):
        once, again = dp(text, host=bare).comm["dp"], dp(text, host=twice).comm["dp"]
        assert again.exposed == pytest.approx(2 * once.exposed)

"""Codecs and policies on dp cost what their own files say: members of tests and of ours, none by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.published import gpt
from unisono.codecs import CODECS
from unisono.config import Recipe
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.planner import formatting, replicas
from unisono.planner.clusters import cluster
from unisono.planner.machines.chip import Traffic
from unisono.planner.machines.cluster import Cluster
from unisono.planner.pricing import price
from unisono.planner.replicas import Cover
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.stack import stack
from unisono.planner.work.networks import Network
from unisono.spec.fidelity import Fidelity
from unisono.spec.workload import Product, Workload, WorkPart
from unisono_contrib.verify.cover import covering

MODEL = gpt(24, 16, 2048, 1024)
OWN = "tests/codecs/own.py"
SELDOM = """
from unisono.spec.work import Call, Work
from unisono.spec.fidelity import Fidelity
from unisono.sync.every_step import EveryStep

class Seldom(EveryStep):
    '''Replicas meet in every fourth step.'''
    name = "seldom"
    fidelity = Fidelity.LOSSY
    def work(self, gradient_bytes, dp):
        (call,) = super().work(gradient_bytes, dp).calls
        return Work((Call("dp", call.op, call.nbytes, 0.25),), moved=self.moved)
    @property
    def moved(self):
        return 0

class Busy(Seldom):
    name = "busy"
    @property
    def moved(self):
        return 1 << 32
"""


def dp(words: str, software: str = "plain") -> Traffic:
    plan = Plan.parse(f"dp=16 precision=bf16 {words}".strip())
    return simulate(PlanRequest(MODEL, plan, cluster("dgx-a100:8"), stack(software), 4, 4)).price.comm["dp"]


def test_bytes_are_those_that_a_codec_declares() -> None:
    whole = dp("").bytes  # in fp32, by an all-reduce: twice 15/16 of 4 bytes
    # 15 others' pairs of 8 bytes, for each hundredth element.
    assert dp(f"codec={OWN}:Largest:ratio=0.01").bytes == pytest.approx(whole * 0.01 * 15 * 8 / 7.5, rel=1e-4)
    # Parts are dealt and gathered in 2 bytes.
    assert dp(f"codec={OWN}:Rounded").bytes == pytest.approx(whole / 2, rel=1e-4)
    assert dp("sync=canonical").bytes == pytest.approx(whole, rel=1e-6)


def test_a_codec_that_is_chosen_costs_what_the_chosen_one_does_and_is_named() -> None:
    """On fast links nothing is lost for nothing; on slow ones as much as is allowed."""
    for slower, allowed in (
        (1.0, "auto"),
        (1000.0, "auto"),
        (1000.0, "auto:int8"),
        (1000.0, "auto:powersgd"),
    ):
        links = tuple(
            replace(link, bandwidth=link.bandwidth / slower, ceiling=None)
            for link in cluster("dgx-a100:8").links
        )
        where = replace(cluster("dgx-a100:8"), links=links)

        def asked(codec: str, where: Cluster = where) -> PlanResult:
            plan = Plan.parse(f"dp=16 precision=bf16 codec={codec}")
            return simulate(PlanRequest(MODEL, plan, where, stack("plain"), 4, 4))

        answer, member = asked(allowed), CODECS.read(allowed)
        steps = {codec: asked(codec).price.step for codec in member.rungs}
        taken = list(steps)[member.taken(list(steps.values()))]
        assert answer.played.codec == taken and (taken == "plain") == (slower == 1.0)
        assert answer.price.step == steps[taken]
        assert any(f"{allowed} takes {taken} here" in said for _, said in formatting.shared_out(answer))
        shown = replicas.least(MODEL, answer.request.plan, where, stack("plain"), 1e9, Cover(0.1, 0.2, 0.5))
        assert (
            shown
            <= replicas.traffic(MODEL, answer.played, where, stack("plain"), 1e9, Cover(0.1, 0.2, 0.5))[2]
        )


def test_gathered_codes_cost_more_than_plain_with_enough_ranks() -> None:
    """All-gathering pairs of 8 bytes pays no more once ratio > 1 / n (Agarwal et al., 2022)."""
    plain, more, less = (dp(f"codec={OWN}:Largest:ratio={ratio}").seconds for ratio in (0.0625, 0.07, 0.055))
    assert less < plain < more
    assert dp("").seconds == pytest.approx(plain, rel=0.01)


def test_a_policy_that_meets_seldom_sends_less_and_what_it_moves_shows(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SELDOM)
    whole, seldom, busy = dp(""), dp(f"sync={tmp_path}/own.py:Seldom"), dp(f"sync={tmp_path}/own.py:Busy")
    assert (seldom.bytes, seldom.seconds) == pytest.approx((whole.bytes / 4, whole.seconds / 4))
    assert busy.exposed - seldom.exposed == pytest.approx(busy.seconds - seldom.seconds)
    assert busy.seconds > seldom.seconds
    both = dp(f"sync={tmp_path}/own.py:Seldom codec={OWN}:Rounded")
    assert both.bytes == pytest.approx(whole.bytes / 8, rel=1e-4)


def test_sums_along_the_tree_over_leaves_wait_for_the_last_backward() -> None:
    assert dp("").exposed < dp("").seconds
    assert dp("sync=canonical").exposed == dp("sync=canonical").seconds


def test_fidelity_and_why_are_the_members_own() -> None:
    assert replicas.fidelity(Plan.parse("dp=4"))[0] is Fidelity.ROUNDING
    assert replicas.fidelity(Plan.parse("dp=4 sync=canonical"))[0] is Fidelity.EXACT
    found, why = replicas.fidelity(Plan.parse(f"dp=4 codec={OWN}:Largest"))
    assert found is Fidelity.LOSSY and why.startswith(f"codec={OWN}:Largest: The largest elements of each")


def test_delayed_gradients_hide_behind_the_steps_between() -> None:
    lockstep, one = dp(""), dp("sync=delayed:lag=1")
    assert one.seconds == lockstep.seconds and one.exposed <= lockstep.exposed
    assert dp("sync=delayed:lag=0").exposed == lockstep.exposed
    cover = replicas.Cover(1.0, 2.0, 0.9)  # seconds of a forward and of a backward
    shown = [cover.beside_backward(10.0), *(cover.beside_steps(10.0, lag) for lag in (1, 2, 4))]
    assert shown == pytest.approx([8, 7, 4, 1])
    assert dp("sync=hogwild").bytes == dp("sync=hogwild").seconds == 0.0


@pytest.mark.parametrize(("sync", "copies"), [("ssp:s=4", 1), ("async", 1), ("quorum:k=12,copies=2", 2)])
def test_servers_share_bytes_and_seconds_of_their_links(sync: str, copies: int) -> None:
    plan = Plan.parse(f"dp=16 precision=bf16 sync={sync}")

    def on(servers: int) -> Traffic:
        where = replace(cluster("dgx-a100:8"), servers=servers)
        return simulate(PlanRequest(MODEL, plan, where, stack("plain"), 4, 4)).price.comm["dp"]

    one, two, every = map(on, (1, 2, 16))
    size = one.bytes / (16 + copies)  # pushed to each copy, and sent to 16 replicas
    assert two.bytes == pytest.approx(size * (8 + copies), rel=1e-6)
    assert every.bytes == pytest.approx(size * (1 + copies), rel=1e-6)
    # One server receives 16 gradients and sends 16 times the weights; of two with two copies, each has both parts.
    assert two.seconds == pytest.approx(one.seconds * (copies + 1) / 4, rel=0.01)
    assert every.seconds < two.seconds < one.seconds


def test_what_meets_on_shard_is_covered_by_itself_where_replicas_meet_otherwise(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SELDOM)
    where = cluster("dgx-a100:8")

    def shown(words: str) -> float:
        plan = Plan.parse(f"{words} shard=8 zero=2 precision=bf16")
        return price(PlanRequest(MODEL, plan, where, stack("plain"), 1, 1)).comm["shard"].exposed

    assert shown(f"dp=8 sync={tmp_path}/own.py:Seldom") == shown("dp=1") < shown("dp=8")


def test_planner_and_prover_promise_the_same() -> None:
    plans = [
        *covering(Recipe(), ranks=4, least=0),
        Plan.parse("dp=2 codec=int8"),
        Plan.parse("dp=2 sync=local_sgd:h=8"),
    ]
    assert {replicas.fidelity(plan)[0] for plan in plans} == {*Fidelity}
    for plan in plans:
        assert replicas.fidelity(plan)[0] is fidelity_of(plan)


def test_networks_pay_for_codecs_too() -> None:
    layers = tuple(
        WorkPart(str(n), 10**6, 2 * 10**6, 10, 10, products=(Product(1, 1000, 1000),)) for n in range(6)
    )
    network, where = Network(Workload(layers)), cluster("dgx-a100:8")
    plans = [Plan.parse(f"dp=16 {words}".strip()) for words in ("", f"codec={OWN}:Rounded")]
    found = [price(PlanRequest(network, plan, where, stack("plain"), 4, 1)).comm["dp"] for plan in plans]
    assert found[1].bytes == pytest.approx(found[0].bytes / 2, rel=1e-3)

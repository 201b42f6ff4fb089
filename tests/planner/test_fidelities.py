"""What exactness costs: the exact plan stays what it was, and what gives it up is quicker and says so."""

import json
from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.search import Ranking, Space, search
from unisono.planner.simulate import Question, simulate
from unisono.planner.space import meshes, plans
from unisono.planner.stack import stack
from unisono.planner.studies.exactness import CODECS, POLICIES, FidelityCosts, costs, judged, sentence
from unisono.planner.studies.exactness import told as told_of
from unisono.spec.fidelity import Fidelity


def space(name: str = "dgx-a100:2", held: str = "", batch: int = 64) -> Space:
    where = cluster(name)
    return Space(gpt(8, 16, 2048, 1024), where, stack("megatron-2022"), batch, None, Plan.parse(held))


def both(within: Space) -> tuple[Ranking, FidelityCosts]:
    found = search(within)
    return found, costs(within, found)


@pytest.mark.parametrize("held", ["", "precision=bf16", "tp=1 pp=1 shard=1 precision=bf16", "precision=fp64"])
def test_the_exact_plan_is_the_one_without_looking_further(held: str) -> None:
    found, told = both(space(held=held))
    assert told.exact is not None and told.exact.answer == found.best[0] == search(space(held=held)).best[0]
    assert told.exact.fidelity is not Fidelity.LOSSY
    steps = [one.step for one in told.best]
    assert steps == sorted(steps) and all(step < told.exact.step for step in steps)
    for one in told.best:
        assert one.fidelity is Fidelity.LOSSY and one.given_up and one.answer.verdict.fits
        plan = one.answer.question.plan
        assert plan.world == 16
        if "precision" in held:
            assert plan.precision == Plan.parse(held).precision and "precision" not in one.given_up
    assert [one for one in told.best if one in told.worth] == list(told.worth)


def test_the_quickest_of_a_codec_is_that_of_pricing_each_plan() -> None:
    within = space("dgx-a100:2", "precision=bf16 tp=1 pp=1 shard=1 codec=int8 recompute=none")
    _, told = both(within)
    each = [
        simulate(
            Question(
                within.model,
                replace(plan, codec="int8"),
                within.cluster,
                within.stack,
                size,
                plan.micros or 1,
            )
        )
        for mesh in meshes(within)
        for plan, size in plans(mesh, within.model.n_layer)
    ]
    least = min(one.price.step for one in each if one.verdict.fits)
    found = [one.step for one in told.best if one.given_up == {"codec"}]
    # What is held is no cheaper than itself, so there is nothing to gain.
    assert told.exact is not None and told.exact.step == pytest.approx(least) and not found


def test_a_slow_network_makes_exactness_dear() -> None:
    where = cluster("dgx-a100:4")
    slow = replace(
        where, links=(*where.links[:-1], replace(where.links[-1], bandwidth=where.links[-1].bandwidth / 50))
    )
    gains: list[float] = []
    for net in (where, slow):
        within = replace(space(held="precision=bf16 tp=1 pp=1 shard=1"), cluster=net)
        _, told = both(within)
        assert told.exact is not None
        gains.append(told.exact.step / told.best[0].step)
        assert {one.answer.question.plan.sync for one in told.best} <= {"every_step", *POLICIES}
        assert {one.answer.question.plan.codec for one in told.best} <= {"plain", *CODECS}
    assert gains[1] > 2 * gains[0]


def test_precision_is_given_up_where_the_device_has_a_rate_for_it() -> None:
    _, told = both(space())
    assert {"precision"} in [one.given_up for one in told.worth] and "precision=bf16" in sentence(told)
    assert "times as fast" in sentence(told) and "8 significant bits, not 24" in told_of(told)[1]
    _, old = both(space("dgx-v100:2"))  # which has fp16 alone
    assert any(one.answer.question.plan.precision == "fp16" for one in old.best)
    answer = told.best[0].answer
    assert judged(answer, "bf16").given_up == told.best[0].given_up - {"precision"}


def test_the_command_says_what_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model.kind gpt --model.n_layer 24 --model.n_head 16 --model.d_model 2048 --model.context 1024"
        " --model.vocab 51200 --train.global_batch 64 --cluster dgx-a100:2"
    ).split()
    assert main(["plan", *flags, "--any-fidelity", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["plan", *flags, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    exact, lossy = told["fidelities"]["exact"], told["fidelities"]["lossy"]
    assert exact["plan"] == without["plans"][0]["plan"] and exact["fidelity"] == "ROUNDING"
    assert [row["plan"] for row in told["plans"]] == [row["plan"] for row in without["plans"]]
    assert {row["fidelity"] for row in told["plans"]} == {"ROUNDING"}
    assert lossy and all(row["fidelity"] == "LOSSY" and row["gives_up"] for row in lossy)
    assert min(row["step_s"] for row in (*lossy, exact)) <= without["plans"][0]["step_s"]
    assert main(["plan", *flags, "--any-fidelity"]) == 0
    page = capsys.readouterr().out
    assert "what exactness costs" in page and "LOSSY" in page and exact["plan"] in page
    assert main(["plan", *flags, "--any-fidelity", "--objective", "memory"]) == 2


def test_where_only_less_exact_plans_fit_the_object_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model.kind gpt --model.n_layer 8 --model.n_head 16 --model.d_model 2048 --model.context 98304"
        " --model.vocab 51200 --train.global_batch 8 --cluster dgx-a100:1 --stack megatron-2022 --any-fidelity"
    ).split()
    assert main(["plan", *flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plans"] == told["pareto"] == [] and told["feasible"] == 0 < told["searched"]
    assert told["fidelities"]["exact"] is None and told["fidelities"]["lossy"]
    assert main(["plan", *flags]) == 0
    assert "nothing that keeps what is computed fits" in capsys.readouterr().out

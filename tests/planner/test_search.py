"""`plan`: what it finds is legal, fits, and is no slower than anything else that it could have said."""

import json

import pytest

from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.search import Space, candidates, search
from unisono.planner.simulate import Question, simulate
from unisono.planner.stack import stack

GPT3 = (
    "--model.kind gpt --model.n_layer 96 --model.n_head 96 --model.d_model 12288 --model.context 2048"
    " --model.vocab 51200 --train.global_batch 1536"
).split()


def space(nodes: int = 2, **given: object) -> Space:
    where = cluster(f"dgx-a100:{nodes}")
    model = gpt(24, 16, 2048, 1024)
    held = Plan.parse("precision=bf16")
    return Space(model, where, stack(where.stack), 64, None, held, **given)  # type: ignore[arg-type]


def test_every_candidate_uses_all_devices_and_deals_the_batch() -> None:
    within = space()
    found = list(candidates(within))
    assert len(found) == len({(str(plan), size) for plan, size in found}) > 100
    for plan, micro_batch in found:
        assert plan.world == 16 and plan.replicas * micro_batch * (plan.micros or 1) == 64
        assert plan.precision == "bf16" and within.model.n_head % plan.tp == 0


def test_the_best_is_the_best() -> None:
    """Against pricing every candidate by itself."""
    within = space()
    found = search(within, top=3)
    asked = [
        simulate(Question(within.model, plan, within.cluster, within.stack, size, plan.micros or 1))
        for plan, size in candidates(within)
    ]
    steps = sorted(answer.price.step for answer in asked if answer.verdict.fits)
    assert found.searched == len(asked) and found.feasible == len(steps)
    assert [answer.price.step for answer in found.best] == steps[:3]
    least = min(answer.verdict.memory.total for answer in asked)
    assert search(within, 1, "memory").best[0].verdict.memory.total == least


def test_what_is_held_stays() -> None:
    held = Plan.parse("tp=4 pp=2 recompute=full precision=bf16")
    within = space()
    found = search(Space(within.model, within.cluster, within.stack, 64, 2, held))
    assert found.best
    for answer in found.best:
        plan = answer.question.plan
        assert (plan.tp, plan.pp, plan.recompute, answer.question.micro_batch) == (4, 2, "full", 2)


def test_the_object_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["plan", *GPT3, "--cluster", "dgx-a100:16", "--plan", "precision=bf16 tp=8", "--top", "2", "--json"]
    )
    got = json.loads(capsys.readouterr().out)
    assert code == 0 and got["schema_version"] == 1 and len(got["plans"]) == 2
    assert got["searched"] > got["feasible"] > 0 and got["seconds"] > 0
    for plan in got["plans"]:
        assert {"plan", "step_s", "mem_gib", "mfu", "bubble", "exposed_comm_s", "bound", "why"} <= set(plan)
        assert Plan.parse(plan["plan"]).world == 128 and "tp=8" in plan["plan"]
    assert got["plans"][0]["step_s"] <= got["plans"][1]["step_s"]
    code = main(["simulate", *GPT3, "--cluster", "dgx-a100:16", "--plan", got["plans"][0]["plan"], "--json"])
    assert json.loads(capsys.readouterr().out)["step_s"] == got["plans"][0]["step_s"]


def test_where_nothing_fits_the_smallest_cluster_that_would_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["plan", *GPT3, "--cluster", "dgx-a100:2", "--plan", "precision=bf16", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == said["exit"] == 5 and said["what"].startswith("no plan fits")
    named = said["try"].split()[1].rstrip(",")
    assert main(["plan", *GPT3, "--cluster", named, "--plan", "precision=bf16", "--quiet"]) == 0
    nodes = int(named.partition(":")[2])
    assert (
        main(["plan", *GPT3, "--cluster", f"dgx-a100:{nodes // 2}", "--plan", "precision=bf16", "--quiet"])
        == 5
    )

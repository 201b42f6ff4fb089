"""`plan`: what it finds is legal, fits, and is no slower than anything else that it could have said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.planner.cores import MODEL, here
from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner import tie_breaks
from unisono.planner.clusters import cluster, names
from unisono.planner.price import price
from unisono.planner.screen import screen
from unisono.planner.search import Space, candidates, on_fewer, search
from unisono.planner.search_arrays import SearchShared
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.space import meshes, plans
from unisono.planner.stack import stack

GPT3 = (
    "--model.kind gpt --model.n_layer 96 --model.n_head 96 --model.d_model 12288 --model.context 2048"
    " --model.vocab 51200 --train.global_batch 1536"
).split()


def space(nodes: int = 2, **given: object) -> Space:
    where = cluster(f"dgx-a100:{nodes}")
    model = gpt(24, 16, 2048, 1024)
    held = Plan.parse("precision=bf16")
    return Space(model, where, stack("megatron-2022"), 64, None, held, **given)  # type: ignore[arg-type]


def test_every_candidate_uses_all_devices_and_deals_the_batch() -> None:
    within = space()
    found = list(candidates(within))
    assert len(found) == len({(str(plan), size) for plan, size in found}) > 100
    for plan, micro_batch in found:
        assert plan.world == 16 and plan.replicas * micro_batch * (plan.micros or 1) == 64
        assert plan.precision == "bf16" and within.model.n_head % plan.tp == 0


def test_the_best_is_the_best() -> None:
    """Against pricing every candidate by itself."""
    within = replace(space(), model=gpt(8, 8, 2048, 1024))
    found = search(within, top=3)
    asked = [
        simulate(PlanRequest(within.model, plan, within.cluster, within.stack, size, plan.micros or 1))
        for plan, size in candidates(within)
    ]
    steps = sorted(answer.price.step for answer in asked if answer.verdict.fits)
    assert found.searched == len(asked) and found.feasible == len(steps)
    assert [answer.price.step for answer in found.best] == steps[:3]
    least = min(answer.verdict.memory.total for answer in asked)
    assert search(within, 1, "memory").best[0].verdict.memory.total == least


def test_all_keys_find_what_pricing_each_plan_finds() -> None:
    """Bounds prune nothing that is among the best or on the front, and counts add up."""
    within = replace(space(16, all_keys=True), batch=128, micro_batch=1)
    found, every = search(within, top=3), list(meshes(within))
    counts = found.counts
    assert counts.searched == sum(mesh.count for mesh in every) > 10_000
    assert counts.searched == counts.priced + counts.too_large + counts.dominated
    assert counts.dominated > 0
    bench, steps, points = SearchShared(within.model, within.cluster, within.stack), [], []
    for mesh in every:
        got = screen(bench, mesh.plan, mesh.axes)
        step, memory, fits = np.broadcast_arrays(got.step, got.memory, got.fits)
        steps.append(step[fits].min(initial=np.inf))
        points.append(memory[fits].min(initial=np.inf))
    best = found.best[0]
    closed = price(
        within.model, best.request.plan, within.cluster, within.stack,
        micro_batch=best.request.micro_batch, micros=best.request.micros,
    )  # fmt: skip
    assert best.price.step <= min(steps) * 1.02 and closed.step <= min(steps) * 1.1
    for answer in found.front:
        assert answer.verdict.fits
    assert found.front[-1].verdict.memory.total == pytest.approx(min(points))


def test_the_front_falls_and_the_best_is_its_first() -> None:
    found = search(space(2, all_keys=True), top=4)
    times = [answer.price.step for answer in found.front]
    sizes = [answer.verdict.memory.total for answer in found.front]
    assert len(times) > 3 and times == sorted(times) and sizes == sorted(sizes, reverse=True)
    assert times[0] == found.best[0].price.step
    costs = {(answer.price.step, answer.verdict.memory.total) for answer in found.best}
    assert len(costs) == len(found.best) == 4


def test_on_fewer_devices_time_memory_and_cost_are_three_wishes() -> None:
    within = space(4)
    found = search(within)
    got = on_fewer(within, found)
    points = [(a.price.step, a.verdict.memory.total, a.price.step * a.request.plan.world) for a in got.front]
    assert {answer.request.plan.world for answer in got.front} >= {8, 16, 32}
    assert got.counts.searched > found.counts.searched and got.best == found.best
    for one in points:
        assert not any(p != one and all(x <= y for x, y in zip(p, one, strict=True)) for p in points)


def test_all_keys_hold_what_is_held_and_leave_what_is_computed() -> None:
    held = Plan.parse("precision=bf16 cp=2 schedule=zbv recompute=full")
    base = space(2)
    found = search(replace(base, held=held, all_keys=True))
    for answer in (*found.best, *found.front):
        plan = answer.request.plan
        assert (plan.cp, plan.recompute, plan.precision, plan.sync) == (2, "full", "bf16", "every_step")
        assert plan.pp == 1 or plan.schedule == "zbv"
    values = {name for mesh in meshes(replace(base, all_keys=True)) for name in mesh.axes.schedules}
    assert {"1f1b", "gpipe", "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev", "interleaved:v=2"} <= values


def test_a_mesh_counts_the_plans_that_it_has() -> None:
    within = replace(space(1, all_keys=True), batch=16, held=Plan.parse("precision=bf16 tp=2 offload=none"))
    for mesh in meshes(within):
        every = [plan for plan, _ in plans(mesh, within.model.n_layer)]
        assert len(every) == mesh.count == len({str(plan) for plan in every})


def test_what_is_held_stays() -> None:
    held = Plan.parse("tp=4 pp=2 recompute=full precision=bf16")
    within = space()
    found = search(Space(within.model, within.cluster, within.stack, 64, 2, held))
    assert found.best
    for answer in found.best:
        plan = answer.request.plan
        assert (plan.tp, plan.pp, plan.recompute, answer.request.micro_batch) == (4, 2, "full", 2)


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
    quickest = min(plan["step_s"] for plan in got["plans"])  # a surer one may be before it
    assert got["priced"] + sum(got["pruned"].values()) == got["searched"]
    assert got["pareto"][0]["step_s"] == quickest
    for point in got["pareto"]:
        assert point["device_s"] == pytest.approx(128 * point["step_s"]) and point["cost"] is None
    code = main(["simulate", *GPT3, "--cluster", "dgx-a100:16", "--plan", got["plans"][0]["plan"], "--json"])
    assert json.loads(capsys.readouterr().out)["step_s"] == got["plans"][0]["step_s"]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        (["--cluster", "dgx-a100", "--plan", "tp=3"], ["--plan without tp=3"]),
        (["--cluster", "dgx-a100", "--plan", "dp=4 tp=4"], ["--plan without dp=4", "--plan without tp=4"]),
        (["--cluster", "dgx-h100:128"], ["--cluster dgx-h100:64", "--train.global_batch 1024"]),
    ],
)
def test_where_no_plan_deals_it_is_said_what_would(
    words: list[str], fixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "gpt", "--train.global_batch", "32"]
    assert main(["plan", *model, *words, "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert "no plan splits a batch of 32 and 4 layers" in told["what"]
    assert told["try"] == ", or ".join(fixes)
    first = fixes[0].split()
    again = [*model, *words[:2]] if first[0] == "--plan" else [*model, *first]
    assert main(["plan", *again, "--json"]) == 0


def test_of_a_file_the_smallest_number_of_nodes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "dgx-a100"\nnodes = 1\n')
    words = ["plan", *GPT3, "--model.n_layer", "24", "--train.global_batch", "128"]  # states for two nodes
    assert main([*words, "--cluster", str(path), "--plan", "precision=bf16", "--json"]) == 5
    said = json.loads(capsys.readouterr().out)["try"]
    nodes = int(said.partition(" in ")[0].removeprefix("nodes = "))
    for count, code in ((nodes, 0), (nodes // 2, 5)):
        path.write_text(f'like = "dgx-a100"\nnodes = {count}\n')
        assert main([*words, "--cluster", str(path), "--plan", "precision=bf16", "--quiet"]) == code


@pytest.mark.parametrize("batch", [12, 36, 100])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_best_plan_costs_no_more_than_what_train_does_by_itself(
    batch: int, ranks: int, tmp_path: Path
) -> None:
    """Which is one micro-batch of all that a rank has."""
    where = here(tmp_path, ranks)
    within = Space(MODEL, where, stack("plain-cpu"), batch, None, Plan())
    best = search(within, top=1).best[0]
    for text in (f"dp={ranks}", f"shard={ranks}"):
        own = simulate(PlanRequest(MODEL, Plan.parse(text), where, within.stack, batch // ranks, 1))
        assert best.price.step <= own.price.step * (1 + tie_breaks.unsure(own.request) + 1e-9), text


@pytest.mark.parametrize("name", [name for name in names() if name != "laptop"])
def test_accelerators_are_priced_with_our_own_software_unless_another_is_named(name: str) -> None:
    assert cluster(name).stack == "plain"


def test_long_contexts_are_dealt_to_ranks_of_cp_by_default() -> None:
    """Where each rank has positions enough; with all keys everywhere."""

    def degrees(context: int, **changes: object) -> set[int]:
        within = space(1, **changes)
        within = replace(within, model=gpt(24, 16, 2048, context), batch=16)
        return {mesh.plan.cp for mesh in meshes(within)}

    assert degrees(2048) == {1}
    assert degrees(8192) == {1, 2, 4}
    assert degrees(2048, all_keys=True) > {1, 2}


def test_between_two_plans_some_blocks_are_played_the_quicker_way() -> None:
    """Where nothing fits without computing every block again, some blocks need not be."""
    where = cluster("dgx-a100:1")
    small = replace(where, device=replace(where.device, memory=12 * 2.0**30))
    within = replace(space(), cluster=small, held=Plan.parse("precision=bf16 shard=8"), micro_batch=4)
    best, *_ = search(within, top=4).best
    alike = search(replace(within, held=Plan.parse("precision=bf16 shard=8 blocks=alike")), top=1).best[0]
    assert alike.request.plan.recompute == "full" and alike.request.plan.blocks == "alike"
    assert best.request.plan.blocks != "alike" and best.verdict.is_safe
    assert best.price.step < 0.99 * alike.price.step
    assert not best.request.plan.check()

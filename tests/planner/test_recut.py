"""Another cut into stages is offered where it is quicker or the only one that fits, and none is better."""

import json
from dataclasses import replace
from itertools import product

import pytest

from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.cuts import cut_of, rows_of, with_cut
from unisono.planner.simulate import PlanRequest, gain, simulate
from unisono.planner.stack import stack
from unisono_contrib.planner.studies.recut import best, better
from unisono_contrib.planner.timeline import timeline

MADE = stack("megatron-2022")


def ask(text: str, gib: float = 80.0, layers: int = 9, vocab: int = 51200) -> PlanRequest:
    where = cluster("dgx-a100:1")
    where = replace(where, device=replace(where.device, memory=gib * 2.0**30))
    model = gpt(layers, 32, 4096, 2048, vocab=vocab)
    return PlanRequest(model, Plan.parse(f"precision=bf16 {text}"), where, MADE, 1, 8)


@pytest.mark.parametrize("gib", [18.0, 20.0, 22.0, 24.0, 32.0, 80.0])
@pytest.mark.parametrize("text", ["pp=3", "pp=3 recompute=full", "pp=3 schedule=gpipe"])
def test_no_cut_has_a_cheaper_dearest_stage(text: str, gib: float) -> None:
    """Every cut of nine blocks into three stages, priced by itself."""
    asked = ask(text, gib)
    busiest: dict[tuple[int, ...], float] = {}
    for counts in product(range(1, 8), repeat=3):
        if sum(counts) == 9:
            plan = replace(asked.plan, schedule=with_cut(asked.plan.schedule, counts))
            got = simulate(replace(asked, plan=plan))
            assert list(got.stages) == list(counts)
            if got.verdict.fits:
                busiest[counts] = got.price.busiest
    found = best(asked)
    assert (found is None) == (not busiest)
    if found is not None:
        assert busiest[cut_of(found.plan.schedule)] <= min(busiest.values()) * (1 + 1e-9)


def test_a_large_head_gets_fewer_blocks_before_it() -> None:
    answer = simulate(ask("pp=4", layers=24, vocab=256000))
    found = better(answer)
    assert found is not None and gain(found, answer) > 0.01
    assert found.stages[-1] < 6 == rows_of(answer.request.model, "1f1b", 4, False)[-1]  # type: ignore[arg-type]
    assert found.price.step < answer.price.step
    assert better(found) is None
    drawn = timeline(found.request, found.price)
    assert len({p.row for p in drawn.placed}) == 4


def test_what_fits_in_no_even_cut_may_fit_in_another() -> None:
    only = []
    for half in range(50, 90):
        answer = simulate(ask("pp=4", half / 2.0, layers=24))
        found = better(answer)
        if not answer.verdict.fits and found is not None:
            assert found.verdict.fits and sum(found.stages) == 24
            only.append(found)
    assert only


FLAGS = (
    "--model.kind gpt --model.n_layer 24 --model.n_head 32 --model.d_model 4096 --model.context 2048"
    " --model.vocab 256000 --train.global_batch 8 --train.micro_batch 1 --cluster dgx-a100"
).split()


def test_the_page_names_the_cut_and_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", *FLAGS, "--plan", "pp=8 precision=bf16", "--stack", "megatron-2022"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["better_cut"]["step_s"] < told["step_s"] and sum(told["better_cut"]["blocks"]) == 24
    assert main(asked) == 0
    assert "% quicker" in capsys.readouterr().out
    again = ["simulate", *FLAGS, "--plan", told["better_cut"]["plan"], "--stack", "megatron-2022", "--json"]
    assert main(again) == 0
    then = json.loads(capsys.readouterr().out)
    assert then["step_s"] == told["better_cut"]["step_s"] and then["better_cut"] is None
    assert [stage["blocks"] for stage in then["stages"]] == told["better_cut"]["blocks"]


@pytest.mark.parametrize(
    "cut", ["1f1b:cut=12/12", "1f1b:cut=x", "interleaved:v=2,cut=12/12", "gpipe:cut=0/24"]
)
def test_a_cut_that_does_not_suit_is_refused(cut: str) -> None:
    assert main(["simulate", *FLAGS, "--plan", f"pp=3 precision=bf16 schedule={cut}", "--quiet"]) == 2

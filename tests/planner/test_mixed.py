"""Mixtures: equal pools are a homogeneous cluster, memory never hurts, slow devices get least, all layers are dealt."""

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.published import gpt
from unisono.cli import main
from unisono.plan import Plan
from unisono.planner.clusters import cluster, is_mixture
from unisono.planner.cuts import with_cut
from unisono.planner.formatting import waterfall
from unisono.planner.search import candidates
from unisono.planner.simulate import PlanRequest, PlanResult, simulate
from unisono.planner.space import Space
from unisono.planner.stack import stack
from unisono.programs.balance import balance
from unisono.spec.errors import UsageError
from unisono_contrib.planner.mixture import Mixture, mixture, placements
from unisono_contrib.planner.studies.mixtures import PlacedAnswer, everywhere, find, pays

MODEL = gpt(24, 16, 2048, 1024)
PLANS = (
    "pp=4 tp=8", "pp=4 tp=4 dp=2", "pp=2 tp=4 shard=4 zero=3 schedule=gpipe", "pp=4 dp=2 tp=4 schedule=interleaved:v=2",
    "pp=4 tp=8 schedule=zb1p", "pp=4 tp=8 schedule=zbv", "pp=4 tp=8 schedule=dualpipev", "pp=2 tp=8 cp=2",
    "pp=4 tp=4 shard=2 zero=1 recompute=full",
)  # fmt: skip


def asked(text: str, where: Mixture, name: str = "plain", micros: int = 8) -> PlanRequest:
    return PlanRequest(MODEL, Plan.parse(f"{text} precision=bf16"), where.whole(), stack(name), 1, micros)


def best(text: str, where: Mixture, micros: int = 8) -> PlanResult:
    return everywhere(where, asked(text, where, micros=micros))[0].answer


def blocks(one: PlacedAnswer, pool: int) -> list[float]:
    """Of the rows on a pool."""
    return [n for n, at in zip(one.answer.stages, one.answer.request.cluster.rows, strict=True) if at == pool]


@pytest.mark.parametrize("name", ["plain", "megatron-2022"])
@pytest.mark.parametrize("text", PLANS)
def test_equal_pools_are_one_cluster_of_their_size(text: str, name: str) -> None:
    where = mixture("dgx-a100:2+dgx-a100:2")
    for one in everywhere(where, asked(text, where, name)):
        if one.where.kind == "rows":
            ask = one.answer.request
            whole = simulate(replace(ask, cluster=cluster("dgx-a100:4")))
            # The optimiser of the largest row, where one cluster's price takes the first row's.
            assert one.answer.price.optimizer >= whole.price.optimizer * (1 - 1e-12)
            without = one.answer.price.step - one.answer.price.optimizer
            assert without == pytest.approx(whole.price.step - whole.price.optimizer, rel=1e-9)
            assert one.answer.verdict.memory.total == pytest.approx(whole.verdict.memory.total)
            assert one.answer.bubble == pytest.approx(whole.bubble)
            assert one.answer.mfu * one.answer.price.step == pytest.approx(whole.mfu * whole.price.step)


def test_replicas_on_equal_pools_are_those_of_one_cluster() -> None:
    where = mixture("dgx-a100:2+dgx-a100:2")
    ask = asked("dp=4 tp=8", where)
    whole = simulate(replace(ask, cluster=cluster("dgx-a100:4")))
    (found,) = everywhere(where, ask)
    assert found.where.kind == "replicas" and found.answer.price.step == pytest.approx(whole.price.step)


@pytest.mark.parametrize("text", [*PLANS, "dp=4 tp=8", "dp=2 pp=2 tp=8"])
def test_parts_add_up_and_no_layer_is_lost(text: str) -> None:
    where = mixture("dgx-a100:2+dgx-v100:2")
    for one in everywhere(where, asked(text, where)):
        got = one.answer
        assert sum(seconds for _, seconds in waterfall(got)) == pytest.approx(got.price.step)
        assert got.price.host >= -1e-9 * got.price.step and got.price.kernels >= 0.0
        assert sum(got.stages) == 24 and all(n >= 1 for n in got.stages)
        assert 0 < got.mfu < 1


def test_the_faster_pool_has_more_layers_and_the_cut_pays() -> None:
    where = mixture("dgx-a100:2+dgx-v100:2")
    first = everywhere(where, asked("pp=4 tp=8", where))[0]
    assert min(blocks(first, 0)) > max(blocks(first, 1))
    even = replace(first.answer.request, plan=Plan.parse("pp=4 tp=8 precision=bf16"))
    assert simulate(even).price.step > first.answer.price.step


def test_the_busiest_row_is_no_dearer_than_with_one_block_elsewhere() -> None:
    where = mixture("dgx-h100:1+dgx-v100:3")
    first = everywhere(where, asked("pp=4 tp=8", where))[0].answer
    cut = [int(n) for n in first.stages]
    for a in range(4):
        for b in range(4):
            if a != b and cut[a] > 1:
                other = list(cut)
                other[a], other[b] = cut[a] - 1, cut[b] + 1
                plan = replace(first.request.plan, schedule=with_cut("1f1b", other))
                assert simulate(replace(first.request, plan=plan)).price.step >= first.price.step * 0.98


def _with_memory(where: Mixture, pool: int, factor: float) -> Mixture:
    pools = list(where.pools)
    device = pools[pool].device
    pools[pool] = replace(pools[pool], device=replace(device, memory=device.memory * factor))
    return replace(where, pools=tuple(pools))


@pytest.mark.parametrize("text", ["pp=4 tp=8", "pp=4 tp=8 schedule=gpipe"])
def test_more_memory_in_a_pool_never_makes_it_worse(text: str) -> None:
    where, before = mixture("dgx-a100:2+dgx-v100:2"), float("inf")
    fitted = False
    for factor in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0):
        found = best(text, _with_memory(_with_memory(where, 0, factor), 1, factor), 16)
        assert found.verdict.fits or not fitted
        if found.verdict.fits:
            assert found.price.step <= before * 1.001
            before, fitted = found.price.step, True
    assert fitted


def test_little_memory_moves_layers_to_the_other_pool() -> None:
    where = mixture("dgx-a100:2+dgx-a100:2")
    need = best("pp=4 tp=8 schedule=gpipe", where, 16)
    room = need.verdict.memory.total * 0.8 / where.pools[1].device.memory
    small = _with_memory(where, 1, room)
    cramped = everywhere(small, asked("pp=4 tp=8 schedule=gpipe", small, micros=16))[0]
    assert cramped.answer.verdict.fits and max(blocks(cramped, 1)) < max(need.stages)


def test_a_pool_without_end_slow_gets_one_layer_a_row() -> None:
    where = _slowed(mixture("dgx-a100:2+dgx-a100:2"), 1, 1e6)
    assert set(blocks(everywhere(where, asked("pp=4 tp=8", where))[0], 1)) == {1}


def test_a_slower_join_never_helps() -> None:
    before = 0.0
    for gbytes in (100.0, 25.0, 6.25, 1.0, 0.1):
        where = mixture("dgx-a100:2+dgx-v100:2")
        where = replace(where, join=replace(where.join, bandwidth=gbytes * 1e9))
        step = best("pp=4 tp=8", where).price.step
        assert step >= before
        before = step


def test_slow_replicas_set_the_pace() -> None:
    where = mixture("dgx-a100:2+dgx-v100:2")
    found = best("dp=4 tp=8", where)
    slow = simulate(asked("dp=4 tp=8", mixture("dgx-v100:2+dgx-v100:2")))
    assert found.price.step == pytest.approx(slow.price.step, rel=0.05)


def test_what_has_no_place_says_what_would_have_one() -> None:
    where = mixture("dgx-a100:1+dgx-v100:3")
    with pytest.raises(UsageError) as caught:
        everywhere(where, asked("pp=2 tp=8 shard=2", where))
    assert "pp=" in caught.value.fix and "16" in caught.value.what


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_no_other_cut_is_cheaper_at_these_speeds(costs: list[int], data: st.DataObject) -> None:
    n = len(costs)
    stages = data.draw(st.integers(1, n))
    speeds = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    beside = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    rooms = data.draw(st.lists(st.integers(1, n), min_size=stages, max_size=stages))

    def dearest(edges: list[int]) -> float:
        parts = list(pairwise(edges))
        if any(hi - lo > room for (lo, hi), room in zip(parts, rooms, strict=True)):
            return float("inf")
        return max((sum(costs[lo:hi]) + beside[k]) / speeds[k] for k, (lo, hi) in enumerate(parts))

    best = min(dearest([0, *inner, n]) for inner in combinations(range(1, n), stages - 1))
    if best == float("inf"):
        with pytest.raises(ValueError, match="room"):
            balance(costs, 0, 0, stages, speeds=speeds, beside=beside, rooms=rooms)
        return
    cuts = balance(costs, 0, 0, stages, speeds=speeds, beside=beside, rooms=rooms)
    assert dearest([0, *(part.stop for part in cuts)]) == pytest.approx(best)


# --- names and files -------------------------------------------------------------------------------------------------

FILE = """
name = "two generations"
[[pool]]
like = "dgx-a100"
nodes = 2
cost_per_hour = 2.0
[[pool]]
like = "dgx-v100"
nodes = 2
cost_per_hour = 1.0
[join]
name = "ethernet"
bandwidth_gb_s = { value = 3.1, origin = "measured here", source = "iperf" }
latency_us = 30
"""


def test_a_name_joins_pools_by_the_slower_of_their_links() -> None:
    found = mixture("dgx-a100:2+dgx-v100:1")
    assert (
        found.devices == 24
        and found.join.bandwidth == 6.25e9
        and found.join.sources["bandwidth"].origin == "specification"
        and "the slower of the pools' own" in found.join.sources["bandwidth"].text
    )
    assert mixture("dgx-v100+dgx-a100:2").join.bandwidth == 6.25e9
    assert mixture("dgx-v100+dgx-a100").stack == "plain"
    assert is_mixture("a+b") and not is_mixture("dgx-a100:4")


def test_a_file_says_what_joins_its_pools(tmp_path: Path) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(FILE)
    found = mixture(str(path))
    assert is_mixture(str(path)) and found.devices == 32 and found.join.bandwidth == 3.1e9
    assert found.join.sources["bandwidth"].origin == "measured here"
    with pytest.raises(UsageError, match="no one kind"):
        cluster(str(path))
    path.write_text(FILE.partition("[join]")[0])
    with pytest.raises(UsageError, match="joins"):
        mixture(str(path))


@pytest.mark.parametrize("text", ["dgx-a100:2+", "dgx-a100:2+dgx-q100", "dgx-a100:0+dgx-v100"])
def test_pools_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        mixture(text)
    assert caught.value.fix


GPT = (
    "--model.kind gpt --model.n_layer 24 --model.n_head 16 --model.d_model 2048 --model.context 1024"
    " --model.vocab 51200 --train.global_batch 64 --train.micro_batch 1"
).split()


def test_simulate_prices_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(FILE)
    words = [
        "simulate",
        *GPT,
        "--cluster",
        str(path),
        "--plan",
        "pp=4 tp=8 precision=bf16",
        "--tokens",
        "1e9",
    ]
    assert main([*words, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {"step_s", "tflops_per_device", "mfu", "mem_gib", "bubble", "comm", "days_to_train"} <= set(got)
    assert [pool["rows"] for pool in got["placement"]["pools"]] == [2, 2]
    assert sum(sum(pool["layers"]) for pool in got["placement"]["pools"]) == 24
    assert "schedule=1f1b:cut=" in got["plan"] and len(got["placements"]) == 2
    assert got["cost"] == pytest.approx(got["days_to_train"] * 24 * (16 * 2.0 + 16 * 1.0))
    assert sum(part["seconds"] for part in got["waterfall"]) == pytest.approx(got["step_s"])
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "placement  pipeline rows 0 to 1 on" in page and "otherwise  pipeline rows" in page


def test_what_a_mixture_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *GPT, "--cluster", "dgx-a100:2+dgx-v100:2", "--json"]
    for more, code in (
        (["--plan", "pp=4 tp=8 schedule=dualpipe micros=64"], 2),
        (["--plan", "pp=4 tp=8", "--batches"], 2),
        (["--plan", "dp=32 precision=bf16", "--train.micro_batch", "2", "--model.n_layer", "240"], 5),
    ):
        assert main([*words, *more]) == code
        got = json.loads(capsys.readouterr().out)
        assert got["what"] and got["try"], more


# --- the search ------------------------------------------------------------------------------------------------------


def searched(name: str, held: str = "precision=bf16", batch: int = 32) -> tuple[Space, Mixture]:
    where = mixture(name)
    return Space(MODEL, where.pools[0], stack("plain"), batch, None, Plan.parse(held)), where


@pytest.mark.parametrize("name", ["dgx-a100:1+dgx-v100:1", "dgx-h100:1+dgx-v100:2"])
def test_the_best_of_the_search_is_nearly_the_best_of_all(name: str) -> None:
    """Against pricing every plan in every placement."""
    base, where = searched(name, "precision=bf16 tp=4 schedule=1f1b")
    found = find(base, where, top=3)
    every: list[float] = []
    for plan, size in candidates(replace(base, cluster=where.whole())):
        if any(placements(where, plan)):
            ask = PlanRequest(MODEL, plan, where.whole(), base.stack, size, plan.micros or 1)
            every += [one.answer.price.step for one in everywhere(where, ask)[:1] if one.answer.verdict.fits]
    assert len(every) > 20 and found.ranking.counts.priced <= len(every)
    assert found.placed[0].answer.price.step <= 1.01 * min(every)


def _slowed(where: Mixture, pool: int, factor: float) -> Mixture:
    pools = list(where.pools)
    device = pools[pool].device
    slow = replace(device, peak={dtype: rate / factor for dtype, rate in device.peak.items()})
    pools[pool] = replace(pools[pool], device=slow)
    return replace(where, pools=tuple(pools))


def test_a_pool_that_is_slow_enough_is_left_out() -> None:
    base, where = searched("dgx-a100:1+dgx-a100:1")
    even = find(base, where, top=1)
    assert even.placed[0].answer.price.step < min(one.price.step for _, one in even.alone if one)
    assert "mixing pays" in pays(even)
    slow = find(base, _slowed(where, 1, 1e4), top=1)
    own = slow.alone[0][1]
    assert own is not None and own.price.step < slow.placed[0].answer.price.step
    assert "leave the others out" in pays(slow)


def test_plan_says_where_and_whether_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        *GPT[:-2],
        "--cluster",
        "dgx-a100:1+dgx-v100:1",
        "--plan",
        "precision=bf16 tp=8",
        "--top",
        "3",
    ]
    assert main([*words, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {"searched", "feasible", "seconds", "plans"} <= set(got) and len(got["plans"]) == 3
    for plan in got["plans"]:
        assert {"plan", "step_s", "mem_gib", "mfu", "bubble", "exposed_comm_s", "bound", "why"} <= set(plan)
        assert plan["step_s"] >= got["plans"][0]["step_s"] and plan["placement"]["pools"]
    assert [one["pool"] for one in got["alone"]] == ["dgx-a100", "dgx-v100"] and "mixing" in got["mixing"]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "each pool alone" in page and got["mixing"] in page


def test_what_fits_nowhere_names_a_cluster_that_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        *GPT[:-2],
        "--model.n_layer",
        "240",
        "--model.d_model",
        "8192",
        "--plan",
        "precision=bf16 tp=8",
    ]
    assert main([*words, "--cluster", "dgx-a100:1+dgx-v100:1", "--json"]) == 5
    got = json.loads(capsys.readouterr().out)
    name = got["try"].split("--cluster ")[1].split(",")[0]
    assert main([*words, "--cluster", name, "--json"]) == 0
    assert main([*words, "--cluster", "dgx-a100:1+dgx-v100:1", "--all-keys", "--json"]) == 2


def test_the_example_is_a_mixture() -> None:
    found = mixture(str(Path(__file__).parents[2] / "examples" / "clusters" / "two_generations.toml"))
    assert [pool.devices for pool in found.pools] == [32, 32] and found.join.bandwidth == 3.1e9

"""Sweeps: every point is the best plan there, efficiency is what it says, and the sentence names what breaks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster, of_size
from unisono.planner.search import Space, search
from unisono.planner.stack import stack
from unisono.spec.errors import UsageError
from unisono_contrib.planner.studies import sweep as sw
from unisono_contrib.report import scaling

MODEL = gpt(24, 16, 2048, 1024)


def space(devices: int = 8, held: str = "precision=bf16", batch: int = 256) -> Space:
    where = of_size("dgx-a100", devices)
    return Space(MODEL, where, stack("megatron-2022"), batch, None, Plan.parse(held))


def sized(devices: int):
    return of_size("dgx-a100", devices)


def test_what_can_be_varied_is_read() -> None:
    assert sw.axis("devices=8..64").values == (8, 16, 32, 64)
    assert sw.axis("nodes=1,3,2").values == (1, 2, 3)
    for wrong in (
        "device=8",
        "devices",
        "devices=x",
        "devices=0..8",
        "devices=1.5",
        "latency=1",
        "nodes=8..1",
    ):
        with pytest.raises(UsageError) as caught:
            sw.axis(wrong)
        assert caught.value.fix


def test_each_point_is_the_best_plan_there() -> None:
    base = space(held="precision=bf16 tp=2")
    rows = sw.sweep(base, sw.axis("devices=4,8,32"), sized)
    assert [row["devices"] for row in rows] == [4, 8, 32]
    for row in rows:
        alone = search(replace(base, cluster=sized(row["devices"])), top=1).best[0]
        assert (row["plan"], row["step_s"]) == (str(alone.request.plan), alone.price.step)
        assert alone.request.plan.tp == 2 and row["global_batch"] == 256
        per = row["tokens_per_s"] / row["devices"] / (rows[0]["tokens_per_s"] / rows[0]["devices"])
        assert row["efficiency"] == pytest.approx(per)


def test_strong_scaling_breaks_and_says_why_and_weak_scaling_holds() -> None:
    held, over = "precision=bf16 dp=2 pp=1 tp=1 shard=1 recompute=none", sw.axis("devices=8..512")
    strong = sw.sweep(space(held=held, batch=128), over, sized)
    assert [row["plan"] is None for row in strong] == [False] * 5 + [True] * 2
    at, says = sw.breaks(over, [strong[0], *strong[5:]])
    assert at == 256 and "batch too small" in says and "ends at devices 256" in says
    weak = sw.sweep(space(held=held, batch=128), over, sized, weak=True)
    assert [row["global_batch"] for row in weak] == [128 * 2**n for n in range(7)]
    assert sw.breaks(over, weak)[0] is None and "it holds at devices 512" in sw.breaks(over, weak)[1]
    assert all(w["efficiency"] >= s["efficiency"] for s, w in zip(strong[1:5], weak[1:5], strict=True))


def test_it_breaks_where_half_is_lost_and_names_the_part() -> None:
    thin = cluster("dgx-a100:64")
    slow = replace(thin.links[1], bandwidth=2e9)

    def thinner(devices: int):
        grown = of_size("dgx-a100", devices)
        return replace(grown, links=(grown.links[0], *([slow] if len(grown.links) > 1 else [])))

    held, over = "precision=bf16 pp=1 tp=1 shard=1 recompute=full", sw.axis("devices=8..512")
    rows = sw.sweep(space(held=held, batch=512), over, thinner)
    at, says = sw.breaks(over, rows)
    assert at is not None and next(row for row in rows if row["value"] == at)["efficiency"] < 0.5
    assert all(row["efficiency"] >= 0.5 for row in rows if row["value"] < at)
    assert "breaks at" in says and "exposed on dp" in says


def test_sizes_of_the_recipe() -> None:
    held = space(16, "precision=bf16 dp=16 recompute=none", 64)
    batches = sw.sweep(held, sw.axis("global_batch=16..256"), sized)
    rates = [row["tokens_per_s"] for row in batches]
    assert rates == sorted(rates) and [row["global_batch"] for row in batches] == [16, 32, 64, 128, 256]
    micro = sw.sweep(replace(held, batch=256), sw.axis("micro_batch=1..8"), sized)
    assert [row["micro_batch"] for row in micro if row["plan"]] == [1, 2, 4, 8]
    longer = sw.sweep(held, sw.axis("context=512..4096"), sized)
    tokens = [row["tokens_per_s"] * row["step_s"] for row in longer]
    assert tokens == pytest.approx([64 * context for context in (512, 1024, 2048, 4096)])
    with pytest.raises(UsageError):
        sw.sweep(held, sw.axis("context=512,1024"), sized, weak=True)


def test_no_memory_is_a_point_without_a_plan() -> None:
    big, over = replace(space(8), model=gpt(96, 96, 12288, 2048)), sw.axis("devices=8,128")
    rows = sw.sweep(big, over, sized)
    assert rows[0]["plan"] is None and "GiB short" in rows[0]["why_none"]
    assert rows[1]["efficiency"] == 1.0
    assert "GiB short" in sw.describe(big, over, rows)[1]


def told_of(base: Space, text: str) -> tuple[dict[str, Any], str]:
    over = sw.axis(text)
    facts, page = sw.describe(base, over, sw.sweep(base, over, sized))
    return facts["sweep"], page


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return json.loads(json.dumps(told_of(space(held="precision=bf16 tp=2 pp=1"), "devices=8,16,4096")[0]))


def test_rows_are_plain_and_whole(told: dict[str, Any]) -> None:
    assert told["says"] and [row["value"] for row in told["points"]] == [8, 16, 4096]
    for row in told["points"]:
        assert (row["plan"] is None) == (row["why_none"] is not None)
        if row["plan"] is not None:
            assert sum(part["seconds"] for part in row["waterfall"]) == pytest.approx(row["step_s"])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture(told: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    path = scaling.write(told, "a GPT", tmp_path / f"scaling{suffix}")
    begin = path.read_bytes()
    assert len(begin) > 10_000
    assert begin.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in begin[:1000]


def test_shares_of_the_picture_are_the_whole_step(told: dict[str, Any]) -> None:
    for row in told["points"]:
        if row["plan"]:
            shares = [scaling.share(row, begins) for _, begins, _ in scaling._PARTS]
            assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("context=512,1024", "at context 1,024"),
        ("micro_batch=1,2", "at micro batch 2"),
        ("global_batch=64,128", "at global batch 128"),
    ],
)
def test_a_point_is_said_in_its_own_unit(text: str, said: str) -> None:
    axis = sw.axis(text)
    assert axis.at(axis.values[-1]) == said


def test_the_page_of_a_sweep_is_as_sure_as_its_worst_point() -> None:
    """Width and devices here are far from what was fitted; the stack's own error alone would be a promise."""
    facts, page = told_of(space(), "devices=8..64")
    worst = max(row["error_pct"] for row in facts["points"])
    assert worst > 100 * space().stack.error
    assert f"within about {worst:.0f} %" in page

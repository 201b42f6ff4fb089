"""What would help: derivatives have the right sign and size, sum up, and what memory buys is more than today's best."""

from dataclasses import replace

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.formatting import Row
from unisono.planner.machines.cluster import Cluster
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono_contrib.planner.studies.sensitivity import change, describe, faster, sensitivities


def asked(plan: str, nodes: int = 16, micro_batch: int = 1, micros: int = 32) -> PlanRequest:
    where = cluster(f"dgx-a100:{nodes}")
    made = Plan.parse(f"{plan} precision=bf16 micros={micros}")
    return PlanRequest(gpt(48, 64, 8192, 2048), made, where, stack("megatron-2022"), micro_batch, micros)


def roomier(ask: PlanRequest, size: float) -> Cluster:
    """So many bytes more on each device."""
    device = ask.cluster.device
    return replace(ask.cluster, device=replace(device, memory=device.memory + size))


def found(ask: PlanRequest) -> dict[str, Row]:
    return {row["what"]: row for row in sensitivities(ask)}


def wired(ask: PlanRequest, name: str, factor: float) -> PlanRequest:
    """With so many times the bandwidth of the links called so."""
    links = tuple(faster(one, factor) if one.name == name else one for one in ask.cluster.links)
    return replace(ask, cluster=replace(ask.cluster, links=links))


def test_sorted_and_every_gain_is_that_of_the_changed_question() -> None:
    ask = asked("dp=4 tp=8 pp=4")
    got = sensitivities(ask)
    assert 8 <= len(got) <= 20  # cheap: a price each, not a search
    assert [c["gain"] for c in got] == sorted((c["gain"] for c in got), reverse=True)
    gain = found(ask)["10 % faster infiniband"]["gain"]
    assert gain == pytest.approx(
        simulate(ask).price.step / simulate(wired(ask, "infiniband", 1.1)).price.step - 1.0
    )
    assert all(c["gain"] >= -1e-12 for c in got if c["kind"] == "buy")


def test_faster_parts_help_less_than_everything_faster() -> None:
    """Ten per cent on all parts is ten per cent less time, but for what the host and software take."""
    ask = asked("dp=4 tp=8 pp=4")
    gains = [c["gain"] for c in sensitivities(ask) if c["kind"] == "buy" and "GB more" not in c["what"]]
    assert 0.05 < sum(gains) < 0.102


def test_what_is_slow_is_what_helps() -> None:
    """With a network of a hundredth, the network is what to buy; on one device no link is named."""
    ask = asked("dp=128")
    buys = [c for c in sensitivities(wired(ask, "infiniband", 0.01)) if c["kind"] == "buy"]
    assert "infiniband" in buys[0]["what"] and buys[0]["gain"] > 0.05
    alone = replace(asked("dp=1", nodes=1), cluster=replace(cluster("dgx-a100:1"), devices=1, links=()))
    assert not any("link" in c["what"] or "nvlink" in c["what"] for c in sensitivities(alone))


def test_memory_buys_what_did_not_fit() -> None:
    """25 GB hold full recomputation alone, 16 GB more hold all activations."""
    ask = asked("dp=4 tp=8 pp=4 recompute=full")
    short = replace(ask, cluster=roomier(ask, 25.5e9 + 1.5e9 - 85.9e9))
    assert simulate(short).verdict.fits
    more = next(c for c in sensitivities(short) if "GB more memory" in c["what"])
    other = simulate(replace(ask, plan=replace(ask.plan, recompute="none")))
    assert (
        more["gain"] == pytest.approx(simulate(ask).price.step / other.price.step - 1.0)
        and "recompute=none" in more["what"]
    )
    plenty = replace(ask, cluster=roomier(ask, 1e12))
    assert next(c for c in sensitivities(plenty) if "GB more memory" in c["what"])["gain"] == 0.0


def test_sentences() -> None:
    assert change("buy", "10 % faster nvlink", 0.0131)["says"] == "10 % faster nvlink: 1.3 % faster training"
    assert "does not fit" in change("plan", "x", 0.2, fits=False)["says"]
    assert "loss" in change("recipe", "x", 0.2)["says"]
    assert "nothing" in describe([change("buy", "x", 0.0)])[1]
    page = describe(sensitivities(asked("dp=4 tp=8 pp=4")))[1]
    assert page.startswith("what would help\n  ") and len(page.splitlines()) <= 7


def test_what_no_timetable_serves_is_not_advised() -> None:
    """Interleaved stages take micro-batches in groups of as many as there are ranks: four, and no two of them."""
    names = set(found(asked("dp=4 tp=8 pp=4 schedule=interleaved:v=2", micros=4)))
    assert not any("twice the micro-batch" in name or "half the global batch" in name for name in names)
    names = set(found(asked("dp=4 tp=8 pp=4 schedule=interleaved:v=2", micros=8)))
    assert {True} == {any(word in name for name in names) for word in ("twice the micro", "half the global")}

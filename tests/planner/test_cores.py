"""A CPU host whose ranks share its cores: its file comes back, and more ranks have no more cores."""

from pathlib import Path

import pytest

from tests.planner.cores import MACHINE, MODEL, here
from unisono.measure.calibrate import as_toml, link_between
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.simulate import PlanRequest, simulate
from unisono.planner.stack import stack
from unisono.spec.errors import UsageError
from unisono_contrib.planner.studies.sensitivity import sensitivities

PLANS = ("dp=4", "shard=4 zero=3", "tp=4", "pp=4 micros=4", "dp=2 pp=2 micros=2", "cp=2 dp=2")
OLD = """
name = "here"
node = 2
stack = "plain"
[device]
peak_tflops = { fp32 = 0.09 }
memory_gb = 10
bandwidth_tb_s = 0.03
[[link]]
name = "loopback"
size = 0
bandwidth_gb_s = 1
latency_us = 200
[host]
cores = 2
update_us = [1.0, 2.0, 3.0]
"""


def test_a_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(as_toml(MACHINE, "a test"))
    got = cluster(str(path))
    assert (got.cores, got.devices, got.stack) == (2, 2, "plain-cpu")
    assert (got.device.peak, got.device.memory, got.device.reserved) == (MACHINE.peak, 1e10, 3e8)
    assert (got.links[0].bandwidth, got.links[0].latency) == pytest.approx(MACHINE.link)
    assert all(
        source.origin == "measured here" for key, source in got.device.sources.items() if key == "peak"
    )


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    got = cluster(str(path))
    assert (got.cores, got.stack) == (2, "plain-cpu")
    path.write_text(OLD.replace("cores = 2", "cores = 0"))
    with pytest.raises(UsageError, match="at least one core"):
        cluster(str(path))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_cores_and_memory_evenly(tmp_path: Path, ranks: int) -> None:
    got = here(tmp_path, ranks)
    busy = min(ranks, MACHINE.count)
    assert ranks * got.device.peak["fp32"] == pytest.approx(busy * MACHINE.peak["fp32"])
    assert ranks * got.device.memory == pytest.approx(MACHINE.count * MACHINE.memory)
    assert got.node == got.devices == ranks


@pytest.mark.parametrize("text", PLANS)
def test_plans_have_a_price_and_an_advice(tmp_path: Path, text: str) -> None:
    ask = PlanRequest(
        MODEL, Plan.parse(text), here(tmp_path), stack("plain-cpu"), 4, Plan.parse(text).micros or 1
    )
    answer = simulate(ask)
    assert answer.verdict.fits and answer.price.step > 0.0 and sensitivities(ask)


def test_a_ring_of_messages_gives_latency_and_bus() -> None:
    """Of a bus of 1 GB/s and messages of 0.2 ms: each byte travels 2 (n - 1) / n times."""
    ranks = 4
    seconds = [(n, 2 * (ranks - 1) * (2e-4 + n / ranks / 1e9)) for n in (4, 1 << 30)]
    bus, latency = link_between(ranks, seconds)
    assert bus == pytest.approx(1e9, rel=0.01) and latency == pytest.approx(2e-4, rel=0.01)

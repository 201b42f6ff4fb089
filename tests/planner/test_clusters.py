"""Clusters are data: named or from a file, every constant with its source, every mistake with its line."""

import json
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.planner import clusters
from unisono.planner.collectives import bus
from unisono.spec.errors import UsageError

MINE = """\
device = "h100-80gb"
node = 4
nodes = 2
cost_per_hour = 2.5

[[link]]
name = "nvlink"
size = 4
bandwidth_gb_s = { value = 450, origin = "measured here", source = "all-reduce of 1 GB" }
latency_us = 4

[[link]]
name = "ethernet"
size = 0
bandwidth_gb_s = 3.1
latency_us = 30
work_s_gb = 4.5
"""
GPT = (
    "--model.kind gpt --model.n_layer 24 --model.n_head 16 --model.d_model 2048 --model.context 1024"
    " --model.vocab 51200 --train.global_batch 64 --train.micro_batch 1"
).split()


@pytest.mark.parametrize("name", clusters.names())
def test_built_in_clusters_say_where_every_constant_comes_from(name: str) -> None:
    made = clusters.cluster(f"{name}:3")
    assert made.devices % 3 == 0 and made.links[-1].size >= made.devices
    for thing in (made.device, *made.links):
        for key, source in thing.sources.items():
            assert source.text, (name, key)


def test_nodes_after_the_colon() -> None:
    made = clusters.cluster("dgx-a100:64")
    assert (made.devices, made.node, made.name) == (512, 8, "dgx-a100:64")
    assert made.levels(1, 8) == (8, 1)
    assert made.levels(8, 64) == (1, 64)
    assert made.levels(2, 32) == (4, 8)
    assert clusters.cluster("dgx-a100").devices == 8


def test_a_file_is_read_with_its_sources(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    made = clusters.cluster(str(tmp_path / "mine.toml"))
    assert (made.devices, made.cost_per_hour, made.links[0].bandwidth) == (8, 2.5, 450e9)
    assert str(made.links[0].sources["bandwidth"]) == "measured here: all-reduce of 1 GB"
    assert made.links[1].sources["bandwidth"].origin == "given"


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("node = 4", "nodse = 4", 2, "did you mean"),
        ('device = "h100-80gb"', 'device = "h100"', 1, "no device is called"),
        ("latency_us = 30", "latency_us = -1", 16, "not a number of 0 or more"),
        ('origin = "measured here"', 'origin = "guessed"', 9, "origin"),
        ("nodes = 2", "nodes = ", 3, "not TOML"),
        ("nodes = 2", "nodes = 0", 3, "at least one node"),
        ('device = "h100-80gb"', "device = { peak_tflops = { bf17 = 3 } }", 1, "did you mean"),
    ],
)
def test_mistakes_name_their_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(UsageError) as caught:
        clusters.cluster(str(path))
    assert said in caught.value.what
    if "link" not in old and line < 10:
        assert caught.value.where == f"{path}:{line}"
    assert caught.value.fix


@pytest.mark.parametrize("text", ["dgx-a10", "dgx-a100:0", "dgx-a100:x", "dgx-a100:", "nowhere.toml"])
def test_unknown_clusters_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        clusters.cluster(text)
    assert caught.value.fix


def test_a_device_computes_in_the_next_wider_dtype_that_it_has() -> None:
    volta = clusters.device("v100-32gb")
    assert volta.flops("bf16") == volta.flops("fp16") == 125e12
    assert clusters.device("tpu-v4").flops("fp32") == 275e12


def test_servers_without_a_network_of_their_own_are_there_and_slower() -> None:
    """PCI Express between four devices, Ethernet between nodes; and the leaves and spine of a RoCE network."""
    pcie, sxm = clusters.cluster("a100-pcie:2"), clusters.cluster("dgx-a100:2")
    assert [link.name for link in pcie.links] == ["nvlink-bridge", "pcie", "ethernet"]
    assert pcie.node == 4 and pcie.devices == 8 and pcie.levels(1, 8) == (2, 2, 2)
    for size in (4, 8):
        assert bus(pcie, 1, size).rate < bus(sxm, 1, size).rate
    roce, full = clusters.cluster("h100-roce:768"), clusters.cluster("dgx-h100:768")
    assert bus(roce, 8, 384).rate == bus(full, 8, 384).rate  # inside a pod
    assert bus(roce, 3072, 2).rate == pytest.approx(bus(full, 3072, 2).rate / 7)


def test_a_node_may_have_several_levels_inside(tmp_path: Path) -> None:
    """A sweep over devices counts whole nodes, and of a part of one keeps the levels that it has."""
    grown = clusters.of_size("a100-pcie", 12)
    assert grown.devices == 12 and grown.node == 4
    part = clusters.of_size("a100-pcie", 2)
    assert [link.name for link in part.links] == ["nvlink-bridge"] and part.devices == 2
    part = clusters.of_size("a100-pcie", 3)
    assert [(link.name, link.size) for link in part.links] == [("nvlink-bridge", 2), ("pcie", 3)]
    assert clusters.of_size("a100-pcie", 1).links == ()
    with pytest.raises(UsageError, match="nodes of 4"):
        clusters.of_size("a100-pcie", 6)


def test_a_price_is_a_users_own_and_keeps_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No built-in cluster has one: prices change."""
    assert all(clusters.cluster(name).cost_per_hour is None for name in clusters.names())
    path = tmp_path / "mine.toml"
    said = 'cost_per_hour = { value = 3.1, source = "my cloud\'s list, on demand, 2026-03-01" }'
    path.write_text(MINE.replace("cost_per_hour = 2.5", said))
    made = clusters.cluster(str(path))
    assert made.cost_per_hour == 3.1 and "2026-03-01" in made.sources["cost_per_hour"].text
    words = [*GPT, "--cluster", str(path), "--json"]
    assert main(["simulate", *words, "--plan", "dp=8 micros=8", "--tokens", "1e9"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["cost"] == pytest.approx(3.1 * got["device_hours"]) and got["cost"] > 0
    assert main(["plan", *words, "--fewer", "--plan", "precision=bf16"]) == 0
    front = json.loads(capsys.readouterr().out)["pareto"]
    assert front and all(row["cost"] == pytest.approx(row["device_s"] / 3600 * 3.1) for row in front)


@pytest.mark.parametrize(
    ("said", "meant"), [("fat-tree", "switched"), ("leaf-spine", "switched"), ("ring", "ring")]
)
def test_networks_have_the_names_of_the_field(tmp_path: Path, said: str, meant: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE + f'topology = "{said}"\n')
    assert clusters.cluster(str(path)).links[-1].topology == meant

"""Clusters are data: named or from a file, every constant with its source, every mistake with its line."""

from pathlib import Path

import pytest

from unisono.planner import clusters
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
"""


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

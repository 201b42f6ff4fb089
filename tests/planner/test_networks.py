"""Designs of networks: full networks change nothing, thinner ones never help, and counted parts are those of textbooks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner import collectives
from unisono.planner.clusters import cluster, device, of_size
from unisono.planner.collectives import all_reduce, bus, exchange, message
from unisono.planner.machines.cluster import TOPOLOGIES, Cluster, Link
from unisono.planner.simulate import PlanRequest
from unisono.planner.stack import stack
from unisono.spec.errors import UsageError


def built(nodes: int, kind: str, ratio: float = 1.0) -> Cluster:
    """A100 nodes with the network between them built in another way; of a thin spine, under leaves of four nodes."""
    where = cluster(f"dgx-a100:{nodes}")
    inner, outer = where.links
    leaf = (replace(outer, name="leaf", size=32),) if ratio > 1.0 else ()
    links = (inner, *leaf, replace(outer, topology=kind, oversubscription=ratio))  # pyright: ignore[reportArgumentType]
    return replace(where, links=links)


def asked(plan: str, nodes: int = 64, micros: int = 16) -> PlanRequest:
    where = cluster(f"dgx-a100:{nodes}")
    made = Plan.parse(f"{plan} precision=bf16 micros={micros}")
    return PlanRequest(gpt(32, 64, 8192, 2048), made, where, stack(where.stack), 1, micros)


def test_crossing_rails_costs_a_way_through_the_node() -> None:
    full, rail = built(8, "switched"), built(8, "rail-only")
    assert message(rail, 16, 1e9) == message(full, 16, 1e9)  # the same place, two nodes on
    assert message(rail, 12, 1e9) == pytest.approx(message(full, 12, 1e9) + message(rail, 4, 1e9))
    assert bus(rail, 8, 8).rate == bus(full, 8, 8).rate and bus(rail, 1, 64).rate == bus(full, 1, 64).rate
    assert bus(rail, 12, 4).rate < bus(full, 12, 4).rate


def test_oversubscription_hurts_what_crosses_it_alone() -> None:
    full, thin = built(64, "switched"), built(64, "switched", 4.0)
    leaf = thin.links[1].size
    assert leaf % 8 == 0 and leaf < 512
    assert message(thin, leaf, 1e9) == pytest.approx(4 * message(full, leaf, 1e9), rel=1e-3)
    assert message(thin, 8, 1e9) == message(full, 8, 1e9)
    # A ring through whole leaves goes up once for a leaf's many members, and is not slowed.
    assert bus(thin, 8, 64).rate == bus(full, 8, 64).rate
    assert bus(thin, leaf, 8).rate == pytest.approx(bus(full, leaf, 8).rate / 4)


def test_a_torus_has_its_bandwidth_along_all_sides_at_once() -> None:
    where = {kind: built(64, kind) for kind in ("ring", "torus2d", "torus3d")} | {
        "fat-tree": built(64, "switched")
    }
    full = bus(where["fat-tree"], 8, 64).rate
    for kind in ("ring", "torus2d", "torus3d"):
        assert bus(where[kind], 8, 64).rate == pytest.approx(full), kind
    # One row of four of a 4 x 4 x 4 torus: a third of the cables; every second of a ring of 64: shared by two.
    assert bus(where["torus3d"], 8, 4).rate == pytest.approx(full / 3)
    assert bus(where["ring"], 16, 32).rate == pytest.approx(full / 2)
    # A stretch of a ring has no way round.
    assert bus(where["ring"], 8, 8).rate == pytest.approx(full / 2)
    near, far = message(where["ring"], 8, 1e9), message(where["ring"], 64, 1e9)
    assert far > 7.9 * near > 2 * message(where["fat-tree"], 8, 1e9)


def test_sides_are_as_near_as_can_be() -> None:
    assert (
        collectives.torus_sides(64, 3) == (4, 4, 4)
        and collectives.torus_sides(48, 2) == (6, 8)
        and collectives.torus_sides(7, 2) == (1, 7)
    )
    for units in range(1, 200):
        for dims in (1, 2, 3):
            product = 1
            for side in collectives.torus_sides(units, dims):
                product *= side
            assert product == units


def test_topology_is_data(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "dgx-a100"\nnodes = 8\n[[link]]\nname = "nvlink"\nsize = 8\nbandwidth_gb_s = 300\nlatency_us = 4\n'
        '[[link]]\nname = "cables"\nsize = 0\nbandwidth_gb_s = 25\nlatency_us = 10\ntopology = "torus2d"\n'
    )
    where = cluster(str(path))
    assert where.links[1].topology == "torus2d"
    grown = of_size(str(path), 512)
    assert grown.devices == 512 and grown.links[1].size == 512 and grown.links[1].topology == "torus2d"
    path.write_text(path.read_text().replace("torus2d", "tours2d"))
    with pytest.raises(UsageError, match="torus2d"):
        cluster(str(path))


def test_a_cluster_of_any_size() -> None:
    base = cluster("dgx-a100:4")
    assert of_size("dgx-a100:4", 32) == base and of_size("dgx-a100", 32) == base
    small = of_size("dgx-a100:4", 2)
    assert (small.devices, small.node, len(small.links)) == (2, 2, 1)
    assert of_size("dgx-a100", 1).links == ()
    with pytest.raises(UsageError) as caught:
        of_size("dgx-a100", 12)
    assert caught.value.fix
    assert replace(base, name="") != replace(of_size("dgx-a100", 64), name="")


def loads(units: int, rings: list[list[int]]) -> dict[tuple[int, int], int]:
    """How many of these closed walks use each cable of a ring of `units`, by its direction; each takes the short way
    between members, unless that leaves its own stretch."""
    used: dict[tuple[int, int], int] = {}
    for walk in rings:
        for here, there in pairwise(walk):
            step = 1 if there > here else -1
            for place in range(here, there, step):
                link = (place % units, step)
                used[link] = used.get(link, 0) + 1
    return used


@pytest.mark.parametrize(
    ("units", "apart", "ways"), [(16, 1, 16), (16, 2, 8), (16, 4, 4), (16, 1, 4), (16, 2, 4), (64, 8, 8)]
)
def test_shares_of_a_ring_are_those_of_counted_cables(units: int, apart: int, ways: int) -> None:
    """All groups at once. A group that closes the ring runs both ways round with half of its bytes each; a stretch runs
    one way, and its last member's bytes go back through the others."""
    where = built(units, "ring")
    closed = apart * ways == units
    walks: list[list[int]] = []
    for begin in range(0, units, apart * ways):
        for first in range(begin, begin + apart):
            members = [first + apart * number for number in range(ways)]
            if closed:
                walks += [[*members, first + units], [first + units, *reversed(members)]]
            else:
                walks.append([*members, first])
    # A device's bandwidth is that of its two cables; a walk carries half of a group's bytes where there are two.
    most = max(loads(units, walks).values())
    share = (2.0 if closed else 1.0) * 0.5 / most
    reached, _ = collectives.ring_share(where.links[1], where.devices, 8, 8 * apart, ways)
    assert reached == pytest.approx(share)


@pytest.mark.parametrize("apart", [1, 2, 8])
def test_messages_share_the_cables_that_they_pass(apart: int) -> None:
    where = built(32, "ring")
    used = loads(32, [[unit, unit + apart] for unit in range(32)])
    reached, hops = collectives.message_share(where.links[1], where.devices, 8, 8 * apart)
    assert reached == pytest.approx(0.5 / max(used.values())) and hops == apart


FLAT = """
node = 8
nodes = 2
[device]
name = "mine"
peak_tflops = { bf16 = 300 }
memory_gb = 16
bandwidth_tb_s = 2
[[link]]
name = "ethernet"
size = 0
bandwidth_gb_s = 10
latency_us = 5
"""


def test_a_cluster_file_has_nodes_also_where_one_link_connects_all(tmp_path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text(FLAT)
    for devices in (8, 16, 32, 128):
        where = of_size(str(path), devices)
        assert where.devices == devices == where.links[-1].size
    assert of_size(str(path), 4).devices == 4
    assert cluster(str(path)).device.name == "mine"


def level(topology: str, units: int, node: int = 1) -> Cluster:
    """So many units of `node` devices that one level of the topology connects, at 1 GB/s and 1 us a device."""
    outer = Link("net", units * node, 1e9, 1e-6, topology=topology)  # type: ignore[arg-type]
    inner = (Link("inner", node, 100e9, 1e-7),) if node > 1 else ()
    return Cluster("one", device("a100-80gb"), units * node, (*inner, outer))


def cut(share: float, ways: int) -> float:
    """Bytes that half of a group sends to the other half in an all-to-all, over those that its network carries."""
    return share * ways * ways / 4.0 / (ways - 1)


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_a_gather() -> None:
    """Each of n devices sends 1/n of its bytes to each other, n/4 devices away on average, two ways at once; gathered,
    all of them go all the way round (Austin et al., How to Scale Your Model, 2025, part 3)."""
    where = level("ring", 64)
    gathered = 64 * 1e9 / (2 * 0.5e9)  # each device's bytes past every other one, two ways at half the rate
    assert exchange(where, 1, 64).all_to_all(1e9) == pytest.approx(gathered / 4, rel=0.01)


@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t != "switched"])
def test_no_topology_beats_switches(topology: str) -> None:
    """All else equal: a share of the cables is a share."""
    full, here = level("switched", 8), level(topology, 8)
    for stride, size in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)):
        assert bus(here, stride, size).rate <= bus(full, stride, size).rate * (1 + 1e-12)
        assert exchange(here, stride, size).all_to_all(1e9) >= exchange(full, stride, size).all_to_all(
            1e9
        ) * (1 - 1e-12)
        assert message(here, stride, 1e9) >= message(full, stride, 1e9) * (1 - 1e-12)
        least = 2 * (size - 1) / size * 1e9 / bus(full, stride, size).rate
        assert all_reduce(here, stride, size, 1e9, 1.0) >= least * (1 - 1e-12)

"""Transports found in a made-up /sys, and the one that ranks take."""

import socket
from pathlib import Path

import pytest

from unisono.launch.doctor import ways
from unisono.launch.transport import NetworkTransport, Route, astray, choose, leading_to, transports
from unisono.spec.errors import Skipped
from unisono_contrib.lab.links import DEVICE, LabLink, address
from unisono_contrib.lab.network import LabNetwork, require
from unisono_contrib.lab.spaces import inside

ETHER, LOOPBACK, INFINIBAND = 1, 772, 32


class Sys:
    """A tree like /sys, written device by device."""

    def __init__(self, root: Path) -> None:
        self.root, self._count = root, 0
        (root / "class" / "net").mkdir(parents=True)
        self.net("lo", LOOPBACK, hardware=False, operstate="unknown", flags="0x9")

    def put(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def net(
        self, name: str, kind: int = ETHER, *, speed: str = "", hardware: bool = True, operstate: str = "up",
        flags: str = "0x1003",
    ) -> None:  # fmt: skip
        self._count += 1
        here = f"class/net/{name}"
        for file, text in {"type": kind, "operstate": operstate, "flags": flags}.items():
            self.put(f"{here}/{file}", str(text))
        for file in ("ifindex", "iflink"):
            self.put(f"{here}/{file}", str(self._count))
        if speed:
            self.put(f"{here}/speed", speed)
        if hardware:
            self.put(f"{here}/device/vendor", "0x15b3")

    def port(
        self, adapter: str, layer: str, rate: str, nets: tuple[str, ...] = (), *, state: str = "4: ACTIVE", port: int = 1
    ) -> None:  # fmt: skip
        here = f"class/infiniband/{adapter}/ports/{port}"
        for file, text in {"link_layer": layer, "state": state, "rate": rate}.items():
            self.put(f"{here}/{file}", text)
        for number, net in enumerate(nets):
            self.put(f"{here}/gid_attrs/ndevs/{number}", net)

    def joins(self, name: str, into: str) -> None:
        (self.root / "class" / "net" / name / "master").symlink_to(self.root / "class" / "net" / into)

    def found(self) -> dict[str, NetworkTransport]:
        return {one.name or one.rdma: one for one in transports(self.root)}


@pytest.fixture
def sys(tmp_path: Path) -> Sys:
    return Sys(tmp_path / "sys")


def taken(sys: Sys, *leading: str, one_host: bool = False, **environ: str):
    return choose(transports(sys.root), leading, one_host, environ, "head")


def said(route: Route) -> str:
    return f"{route.device}: {route.why}"


def test_a_host_with_nothing_but_loopback(sys: Sys) -> None:
    assert transports(sys.root) == (NetworkTransport("lo", "loopback"),)
    assert taken(sys, one_host=True).settings == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    alone = taken(sys)
    assert (alone.device, alone.settings) == ("", {}) and "no device that is up" in alone.why
    assert transports(sys.root / "nowhere") == ()


def test_of_two_ethernets_the_faster_that_leads_there_and_is_up(sys: Sys) -> None:
    sys.net("eth0", speed="1000")
    sys.net("eth1", speed="25000")
    sys.net("eth2", speed="100000", operstate="down", flags="0x1002")
    found = sys.found()
    assert (found["eth1"].kind, found["eth1"].rate, found["eth1"].up) == ("ethernet", 25e9, True)
    assert not found["eth2"].up and found["eth2"].says() == "eth2 (Ethernet, 100 Gbit/s, down)"
    both = taken(sys, "eth0", "eth1", "eth2")
    assert both.settings == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert said(both) == "eth1: Ethernet, 25 Gbit/s; it leads to head, and is the fastest of 2"
    one = taken(sys, "eth0")
    assert (
        one.device == "eth0" and "eth1 (Ethernet, 25 Gbit/s) is faster: give head by its address" in one.why
    )
    assert taken(sys).device == "eth1", "where none is known to lead there"
    assert "own name for itself" in taken(sys).why
    assert taken(sys, one_host=True).device == "lo"


def test_a_speed_that_nobody_says_is_not_known(sys: Sys) -> None:
    sys.net("eth0", speed="-1")
    sys.net("eth1")
    (sys.root / "class/net/eth1/speed").mkdir()  # reading it is an error, as EINVAL of a device that is down
    sys.net("eth2", speed="what?")
    assert [sys.found()[name].rate for name in ("eth0", "eth1", "eth2")] == [None] * 3
    assert taken(sys, "eth1", "eth0").device == "eth1", "of equals the kernel's own"
    assert said(taken(sys, "eth1")) == "eth1: Ethernet; it leads to head"


def test_a_bond_carries_what_its_members_do_and_these_are_not_taken(sys: Sys) -> None:
    sys.net("bond0", hardware=False)
    sys.put("class/net/bond0/bonding/slaves", "eth0 eth1 eth2")
    for name, state in (("eth0", "up"), ("eth1", "up"), ("eth2", "down")):
        sys.net(name, speed="10000", operstate=state)
        sys.joins(name, "bond0")
    sys.put("class/net/bonding_masters", "bond0")
    found = sys.found()
    assert (found["bond0"].kind, found["bond0"].made, found["bond0"].rate) == ("ethernet", "bond", 20e9)
    assert found["eth0"].part_of == "bond0"
    assert taken(sys).device == "bond0" == taken(sys, "bond0").device
    sys.put("class/net/bond0/speed", "15000")
    assert sys.found()["bond0"].rate == 15e9, "what it says itself goes first"


def test_a_bridge_for_containers_beside_the_real_device(sys: Sys) -> None:
    sys.net("docker0", hardware=False, speed="10000")
    sys.put("class/net/docker0/bridge/stp_state", "0")
    sys.net("veth7", hardware=False, speed="10000")
    sys.joins("veth7", "docker0")
    sys.net("tap0", hardware=False, speed="10000")
    sys.put("class/net/tap0/tun_flags", "0x1002")
    sys.net("eth0", speed="1000")
    found = sys.found()
    assert (found["docker0"].kind, found["docker0"].made, found["docker0"].rate) == (
        "virtual",
        "bridge",
        None,
    )
    assert taken(sys).device == "eth0" == taken(sys, "eth0").device


def test_inside_a_container_the_virtual_device_is_the_way(sys: Sys) -> None:
    sys.net("eth0", hardware=False, speed="10000")
    sys.put("class/net/eth0/iflink", "77")
    assert (sys.found()["eth0"].kind, sys.found()["eth0"].made) == ("virtual", "veth")
    assert taken(sys, "eth0").device == "eth0" == taken(sys).device


def test_infiniband_ports_with_and_without_a_network_device(sys: Sys) -> None:
    sys.net("eth0", speed="1000")
    sys.net("ib0", INFINIBAND, speed="-1")
    sys.port("mlx5_0", "InfiniBand", "400 Gb/sec (4X NDR)", ("ib0",))
    sys.port("mlx5_1", "InfiniBand", "400 Gb/sec (4X NDR)")
    sys.port("mlx5_2", "InfiniBand", "100 Gb/sec (4X EDR)")
    sys.port("mlx5_3", "InfiniBand", "10 Gb/sec (4X SDR)", state="1: DOWN")
    found = sys.found()
    assert found["ib0"] == NetworkTransport("ib0", "infiniband", 4e11, True, "mlx5_0:1")
    assert found["mlx5_1:1"] == NetworkTransport("", "infiniband", 4e11, True, "mlx5_1:1")
    assert not found["mlx5_3:1"].up
    by_ethernet = taken(sys, "eth0")
    assert by_ethernet.settings == {
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"
    }, "the slower port would hold the others back"  # fmt: skip
    assert "RDMA by mlx5_0:1, mlx5_1:1" in by_ethernet.why and "ib0" in by_ethernet.why
    assert taken(sys, "ib0").device == "ib0"
    assert "NCCL_IB_HCA" not in taken(sys, one_host=True).settings


def test_roce_is_ethernet_whose_adapter_does_rdma(sys: Sys) -> None:
    sys.net("eth0", speed="1000")
    sys.net("ens1", speed="100000")
    sys.port("mlx5_0", "Ethernet", "100 Gb/sec (4X EDR)", ("ens1", "", "ens1"))
    assert sys.found()["ens1"] == NetworkTransport("ens1", "roce", 1e11, True, "mlx5_0:1")
    route = taken(sys, "ens1")
    assert route.settings["NCCL_IB_HCA"] == "=mlx5_0:1" and route.why.startswith(
        "RoCE, 100 Gbit/s, mlx5_0:1; it leads"
    )
    sys.put("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert not sys.found()["ens1"].up and "NCCL_IB_HCA" not in taken(sys, "eth0").settings


def test_two_ports_of_one_adapter_are_told_apart_by_their_numbers(sys: Sys) -> None:
    for number, name in enumerate(("ib0", "ib1")):
        sys.net(name, INFINIBAND)
        sys.put(f"class/infiniband/mlx4_0/device/net/{name}/dev_port", str(number))
        sys.port("mlx4_0", "InfiniBand", "56 Gb/sec (4X FDR)", port=number + 1)
    assert {name: sys.found()[name].rdma for name in ("ib0", "ib1")} == {"ib0": "mlx4_0:1", "ib1": "mlx4_0:2"}


def test_what_the_user_has_set_stays_and_is_said(sys: Sys) -> None:
    sys.net("eth0", speed="1000")
    sys.net("eth1", speed="1000")
    sys.port("mlx5_0", "InfiniBand", "100 Gb/sec (4X EDR)")
    route = taken(sys, "eth0", GLOO_SOCKET_IFNAME="eth1", NCCL_IB_HCA="mlx5_9")
    assert route.device == "eth1" and route.settings == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert "GLOO_SOCKET_IFNAME=eth1, NCCL_IB_HCA=mlx5_9 of the environment" in said(route)
    assert "else eth0" in said(route)
    assert taken(sys, one_host=True, GLOO_SOCKET_IFNAME="eth0").device == "eth0"
    assert taken(sys, "eth0", GLOO_SOCKET_IFNAME="").device == "eth0", "an empty one says nothing"


def test_where_sysfs_says_nothing_the_kernels_way_is_taken() -> None:
    assert said(choose((), ("eth7",), False, {}, "head")) == "eth7: it leads to head"


def test_names_that_lead_nowhere_else() -> None:
    assert leading_to("localhost") == leading_to("127.0.0.1") == leading_to("no host at all") == ()
    for name, own in ((name, _address(name)) for _, name in socket.if_nameindex()):
        if own and not own.startswith("127."):
            assert leading_to(own)[:1] == (name,), "a host's own address is on its own device"


def _address(name: str) -> str:
    import psutil

    known = psutil.net_if_addrs().get(name, ())
    return next((one.address for one in known if one.family == socket.AF_INET), "")


@pytest.mark.parametrize(
    ("address", "here", "why"),
    [
        ("no.such.host.invalid", False, "no host is called no.such.host.invalid"),
        ("203.0.113.7", True, "203.0.113.7 is none of its addresses: "),  # kept for documents
        ("203.0.113.7", False, ""),
        ("127.0.0.1", True, ""),
        ("localhost", True, ""),
    ],
)
def test_why_nobody_is_met_at_an_address(address: str, here: bool, why: str) -> None:
    found = astray(address, here)
    assert why in found and bool(found) == bool(why)


def test_the_doctor_names_a_device_that_is_not_there_or_down(sys: Sys) -> None:
    sys.net("eth0", speed="1000")
    sys.net("eth1", operstate="down")
    found = transports(sys.root)
    assert ways(found, {}).ok and "eth0 (Ethernet, 1 Gbit/s); down: eth1" in ways(found, {}).detail
    for name, word in (("eth9", "no device here"), ("eth1", "down")):
        check = ways(found, {"GLOO_SOCKET_IFNAME": name})
        assert not check.ok and name in check.detail and word in check.detail and "eth0" in check.fix
    assert (
        ways(found, {"NCCL_SOCKET_IFNAME": "=eth0"}).ok and ways(found, {"NCCL_SOCKET_IFNAME": "^docker"}).ok
    )
    assert ways((), {"GLOO_SOCKET_IFNAME": "eth9"}).note


@pytest.mark.slow
@pytest.mark.root
def test_on_a_host_of_the_lab_its_cable_leads_to_the_others() -> None:
    link = LabLink(1e9)
    try:
        require(link)
    except Skipped as lacking:
        pytest.skip(lacking.what)
    with LabNetwork(2, link) as network:
        for host in network.hosts:
            with inside(host):
                ways_there = [leading_to(address(number)) for number in range(2)]
            assert ways_there == [(DEVICE,), (DEVICE,)], "also to itself, where the others come in"
    assert choose((NetworkTransport(DEVICE, "virtual"),), (DEVICE,), False, {}, "host0").device == DEVICE

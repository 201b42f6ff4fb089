"""Which processes a lab starts, under which variables, and what their ends mean."""

import pytest

from unisono.launch.starters import detect
from unisono_contrib.lab.network import DeviceBytes, device_bytes
from unisono_contrib.lab.play import commands, exit_code

WORDS = ["train", "--rank={rank}", "{host}/{hosts}", '{"json": 1}']


@pytest.mark.parametrize("starter", ["environment", "torchrun", "slurm", "mpi"])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (3, 2, 2)])
def test_each_process_finds_its_place(starter: str, counts: tuple[int, ...]) -> None:
    started = commands(WORDS, counts, {"HOME": "/root"}, starter, cores=2)
    assert [one.number for one in started] == list(range(sum(counts)))
    for one in started:
        place = detect(one.environ)
        assert place is not None
        assert (place.rank, place.world) == (one.number, sum(counts))
        assert place.local_world == counts[one.host]
        assert place.rank == sum(counts[: one.host]) + place.local_rank
        assert place.master == "host0"
        assert one.argv[1:] == (f"--rank={one.number}", f"{one.host}/{len(counts)}", '{"json": 1}')


def test_backends_meet_on_the_link_and_cores_are_shared() -> None:
    (one, *_) = commands(["x"], (1,) * 4, {}, "environment", cores=8)
    assert one.environ["GLOO_SOCKET_IFNAME"] == one.environ["NCCL_SOCKET_IFNAME"] == "lab0"
    assert one.environ["OMP_NUM_THREADS"] == "2"
    (mine, *_) = commands(["x"], (1,) * 4, {"OMP_NUM_THREADS": "5"}, "environment", cores=8)
    assert mine.environ["OMP_NUM_THREADS"] == "5"
    assert commands(["x"], (2, 2), {}, "environment", cores=1)[0].environ["OMP_NUM_THREADS"] == "1"


def test_a_launcher_is_started_once_a_host_and_finds_no_rank() -> None:
    words = ["torchrun", "--node-rank", "{host}", "--nproc-per-node", "{local_ranks}", "{master}:{port}"]
    started = commands(words, (2, 1), {}, "environment", cores=2, each="host")
    assert [one.host for one in started] == [0, 1]
    assert [one.argv[2] for one in started] == ["0", "1"]
    assert [one.argv[4] for one in started] == ["2", "1"]
    assert started[1].argv[-1] == "host0:29500"
    assert detect(started[0].environ) is None


def test_other_braces_stay() -> None:
    *_, last = commands(["{a} {rank}{rank} {}"], (4,), {}, "environment", cores=2)
    assert last.argv == ("{a} 33 {}",)


def test_exit_codes_are_a_shells() -> None:
    assert [exit_code(status) for status in (0, 7, -9, -15)] == [0, 7, 137, 143]


def test_bytes_are_read_from_the_kernels_table() -> None:
    table = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo:     10       1    0    0    0     0          0         0       10       1    0    0    0\n"
        "  lab0: 143430    2078    0    0    0     0          0         0  6436866    1678    0    0    0\n"
    )
    assert device_bytes(table, "lab0") == DeviceBytes(sent=6436866, received=143430)
    assert device_bytes(table, "lab0").since(DeviceBytes(6436800, 143400)) == DeviceBytes(66, 30)
    with pytest.raises(OSError, match="eth0"):
        device_bytes(table, "eth0")

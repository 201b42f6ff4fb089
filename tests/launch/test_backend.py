"""Which backend serves the ranks of a host: a table of what is asked for and what is there."""

import pytest

from unisono.launch.backend import Equipment, choose, settings
from unisono.spec.errors import UsageError

BOTH, CPU_ONLY, GPU_ONLY = frozenset({"gloo", "nccl"}), frozenset({"gloo"}), frozenset({"nccl"})


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "built", "backend", "why", "note"),
    [
        ("auto", 4, 0, CPU_ONLY, "gloo", "no GPU on this host", ""),
        ("auto", 4, 0, BOTH, "gloo", "no GPU on this host", ""),
        ("auto", 4, 4, BOTH, "nccl", "a GPU of its own", ""),
        ("auto", 1, 8, BOTH, "nccl", "a GPU of its own", ""),
        ("auto", 8, 4, BOTH, "gloo", "8 ranks, 4 GPUs", "a plan of 4 ranks uses the GPUs"),
        ("auto", 2, 1, BOTH, "gloo", "2 ranks, 1 GPU", "a plan of 1 rank uses the GPUs"),
        ("auto", 2, 2, CPU_ONLY, "gloo", "without NCCL", "2 GPUs on this host"),
        ("gloo", 2, 0, BOTH, "gloo", "as asked for", ""),
        ("gloo", 2, 4, BOTH, "gloo", "4 GPUs idle", ""),
        ("nccl", 2, 2, BOTH, "nccl", "as asked for", ""),
        ("nccl", 2, 2, GPU_ONLY, "nccl", "as asked for", ""),
        ("auto", 2, 2, GPU_ONLY, "nccl", "a GPU of its own", ""),
        ("nccl:shared", 2, 2, BOTH, "nccl", "as asked for", ""),
        ("nccl:shared", 4, 1, BOTH, "nccl", "4 ranks take turns on 1 GPU", "its speed says nothing"),
    ],
)
def test_what_is_there_serves_and_says_why(
    asked: str, ranks: int, gpus: int, built: frozenset[str], backend: str, why: str, note: str
) -> None:
    got = choose(asked, ranks, Equipment(gpus, built))
    assert got.name == backend and why in got.why and note in got.note
    assert bool(got.note) == bool(note), "what was asked for, or is all there is, needs no note"


@pytest.mark.parametrize(("visible", "told"), [("", False), ("-1", False), ("7", True), ("abc", True)])
def test_gpus_that_a_variable_hides_are_told(visible: str, told: bool) -> None:
    note = choose("auto", 2, Equipment(0, BOTH, visible=visible)).note
    assert bool(note) == told == (f"CUDA_VISIBLE_DEVICES={visible}" in note)


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "built", "what", "fix"),
    [
        ("nccl", 2, 0, BOTH, "this process sees none", "launch.backend=auto or gloo"),
        ("nccl", 2, 0, CPU_ONLY, "without NCCL", "torch with CUDA"),
        ("nccl:shared", 2, 0, BOTH, "this process sees none", "launch.backend=auto or gloo"),
        (
            "nccl",
            2,
            1,
            BOTH,
            "2 ranks on 1 GPU: NCCL lets no two ranks share one",
            "nccl:shared to try the plan",
        ),
        ("gloo", 2, 2, GPU_ONLY, "without Gloo", "launch.backend=nccl"),
        ("auto", 2, 1, GPU_ONLY, "without Gloo", "launch.backend=nccl"),
        ("auto", 2, 0, frozenset[str](), "without Gloo", "a torch with Gloo"),
    ],
)
def test_what_cannot_serve_is_refused_with_a_remedy(
    asked: str, ranks: int, gpus: int, built: frozenset[str], what: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose(asked, ranks, Equipment(gpus, built))
    assert (caught.value.code, caught.value.where) == ("L08", "launch.backend")
    assert what in caught.value.what and fix in caught.value.fix


def test_the_doctor_hears_of_each() -> None:
    assert Equipment(0, CPU_ONLY).says() == (
        "gloo for CPUs, nccl not built, mpi not there (mpirun and mpi4py)"
    )
    assert Equipment(2, BOTH, True).says() == "gloo for CPUs, nccl for 2 GPUs, mpi by collective=mpi"
    assert "nccl built, and no GPU" in Equipment(0, BOTH).says()


def test_ranks_that_share_a_gpu_are_hosts_to_nccl() -> None:
    told = [settings("nccl:shared", host, rank) for host in ("a", "b") for rank in (0, 1)]
    assert len({each["NCCL_HOSTID"] for each in told}) == 4
    assert settings("nccl", "a", 0) == settings("auto", "a", 0) == {}

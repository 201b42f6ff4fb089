"""The doctor: a fit machine is fit, each fault has a remedy, and nothing of it needs torch on this side."""

import json
import os
import socket
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from unisono.launch import doctor
from unisono.launch.outcome import Outcome
from unisono.spec.errors import UserCodeError

Usage = namedtuple("Usage", "total used free")


@pytest.mark.timeout(90)
def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    result = doctor.run()
    assert result["pass"], result
    names = [check["name"] for check in result["checks"]]
    assert names == [
        "python", "torch", "cores", "memory", "disk", "/dev/shm", "loopback", "transport", "port", "all-reduce",
        "backend", "gpu", "clock",
    ]  # fmt: skip
    json.dumps(result)
    assert "lo" in [one["name"] for one in result["transports"]]
    assert "2 ranks on gloo" in capsys.readouterr().out


def test_no_torch_is_a_fault_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    check = doctor.torch()
    assert not check.ok and check.fix == "pip install torch" and check.line().startswith("fault")
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.4.1+cu121")
    assert not doctor.torch().ok


def test_a_full_disk_and_a_folder_without_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.disk(tmp_path).ok
    assert not doctor.disk(tmp_path / "nowhere").ok
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(1, 1, 1000))
    assert not doctor.disk(tmp_path).ok
    assert doctor.shared_memory().note


def test_a_clock_that_jumps_or_stands_in_the_past() -> None:
    assert doctor.clock(5.0, 5.1, 1.8e9).ok
    assert not doctor.clock(3605.0, 5.0, 1.8e9).ok
    assert "1970" in doctor.clock(5.0, 5.0, 60.0).detail


def test_a_port_in_use_is_worth_a_note() -> None:
    with socket.socket() as busy:
        try:
            busy.bind(("127.0.0.1", 29500))
            busy.listen()
        except OSError:
            pass  # somebody else has it: just as well
        check = doctor.port()
    assert check.ok and check.note and "--standalone" in check.fix


def test_ranks_that_fail_or_sum_wrongly_are_faults() -> None:
    failed = doctor.judge(Outcome([None, None], UserCodeError("killed by SIGKILL", rank=1), 137))
    assert not failed[0].ok and "rank 1" in failed[0].detail
    wrong = {"right": False, "small_ms": 1.0, "large_ms": 1.0, "gpus": [], "software": "", "built": ["gloo"]}
    assert not doctor.judge(Outcome([wrong, wrong], None, 0))[0].ok
    gpu = {**wrong, "right": True, "gpus": ["H200", "H200"], "software": "CUDA 13.0"}
    assert "2: H200" in doctor.judge(Outcome([gpu, gpu], None, 0))[2].detail


def test_a_container_that_may_use_less_than_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": "100000 200000", "memory.max": "1000000", "memory.current": "900000"}
    monkeypatch.setattr(doctor, "_cgroup", limits.__getitem__)
    assert "0.5" in doctor.cores().detail
    assert not doctor.memory().ok


def test_the_side_that_watches_imports_no_torch() -> None:
    folder = Path(doctor.__file__).parent
    rank_side = {"doctor_probe", "__init__"}
    names = [f"unisono.launch.{p.stem}" for p in folder.glob("*.py") if p.stem not in rank_side]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), check=False)
    assert done.returncode == 0

"""The sink `resources`: what a rank and its host take, with counters, GPUs and disks that the tests bring along."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.observe.span import Recorder
from unisono.spec.sink import SINKS, RunFacts
from unisono_contrib.train.sinks import _resources
from unisono_contrib.train.sinks._host import Gpus, JouleCounter, MachineMeter, packages
from unisono_contrib.train.sinks._resources import ProcessMeter, ResourceSampler


def facts(folder: Path, rank: int = 0, host: str = "h1") -> RunFacts:
    return RunFacts(folder, rank, 2, host, "gloo", {}, 0, 10, Recorder())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_a_rank_that_computes_is_seen_to_be_busy() -> None:
    meter = ProcessMeter()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    taken = meter.read()
    assert taken["cores"] > 0.2 and taken["rss_mib"] > 10


def test_one_rank_of_a_host_samples_it_and_another_takes_over(tmp_path: Path) -> None:
    sink = SINKS.read("resources:every=0.1")
    first, second = (sink.open(facts(tmp_path, rank)) for rank in (0, 1))
    assert isinstance(first, ResourceSampler) and isinstance(second, ResourceSampler)
    elsewhere = sink.open(facts(tmp_path, 2, "h2"))
    host = tmp_path / "resources/host-h1.jsonl"
    try:
        first.ended(3, False)
        until(lambda: host.exists() and len(lines(host)) > 2)
        assert sum(line.get("kind") == "info" for line in lines(host)) == 1
        (leader,) = (one for one in (first, second) if one._host is not None)
        other = second if leader is first else first
        leader.close()
        until(lambda: sum(line.get("kind") == "info" for line in lines(host)) == 2)
        assert other._host is not None
    finally:
        for sampler in (second, elsewhere) if leader is first else (first, elsewhere):
            sampler.close()
    assert (tmp_path / "resources/host-h2.jsonl").exists()
    sample = lines(host)[1]
    assert {"at", "step", "cores", "available_mib", "swap_mib", "disk", "net"} <= sample.keys()
    assert {line["step"] for line in lines(tmp_path / "resources/rank0.jsonl")[1:]} >= {3}
    assert not any(thread.name == "resources" for thread in threading.enumerate())


def test_what_a_full_disk_does_not_take_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ResourceSampler(facts(tmp_path), 0.1)
    write, full = sampler._file.write, True

    def writes(*records: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(*records)

    monkeypatch.setattr(sampler._file, "write", writes)
    sampler._waiting.append((sampler._file, {"at": 1.0, "step": 1}))
    with pytest.raises(OSError, match="No space"):
        sampler.observe([])
    full = False
    sampler.observe([])
    assert {"at": 1.0, "step": 1} in lines(tmp_path / "resources/rank0.jsonl")
    sampler.close()
    assert not sampler._thread.is_alive()


def zone(folder: Path, name: str, micro: int, most: int = 1_000_000) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "energy_uj").write_text(f"{micro}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{most}\n")
    return folder / name


def test_energy_is_of_whole_packages_and_its_counter_may_begin_again(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", 500_000)
    assert packages(tmp_path) == [package]
    counter = JouleCounter(package)
    first = counter.read()
    (package / "energy_uj").write_text("100000\n")
    assert counter.read() - first == pytest.approx(0.2)
    (package / "energy_uj").unlink()
    assert counter.read() - first == pytest.approx(0.2)


class FakeNvml(SimpleNamespace):
    """Two cards; the second one tells neither its power nor its errors."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    ended = 0

    def nvmlInit(self) -> None:
        return None

    def nvmlShutdown(self) -> None:
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return f"H100 {gpu}"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 * (gpu + 1), memory=3)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return 1000 * kind

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu:
            raise RuntimeError("Not Supported")
        return 412_345

    def nvmlDeviceGetTemperature(self, gpu: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, since: int) -> int:
        if gpu:
            raise RuntimeError("Not Supported")
        return 2

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 0x40 * gpu | 0x04

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return 5_000 * (gpu + 1)


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    meter = MachineMeter(tmp_path, powercap=tmp_path)
    assert meter.facts()["gpus"] == ["H100 0", "H100 1"] and meter.facts()["energy"] == ["gpu"]
    taken = meter.read()
    assert taken["gpus"][0] == {
        "busy": 0.5, "memory_mib": 3072, "sm_mhz": 1000, "memory_mhz": 2000, "watts": 412.3, "celsius": 61, "ecc": 2,
        "throttled": False,
    }  # fmt: skip
    assert taken["gpus"][1] == {
        "busy": 1.0, "memory_mib": 3072, "sm_mhz": 1000, "memory_mhz": 2000, "celsius": 61, "throttled": True,
    }  # fmt: skip
    assert taken["joules"] == {"gpu": 15.0}
    meter.close()
    assert nvml.ended == 1


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    gpus = Gpus()
    assert gpus.read() == [] and gpus.names() == [] and gpus.joules() is None
    gpus.close()


def test_the_folder_is_the_readers() -> None:
    assert _resources.FOLDER == "resources"

"""What a host has and what of it is in use: cores, memory, swap, disk, network, GPUs, energy. No torch.

GPUs are asked through NVML (`pip install "unisono[nvml]"`), and left out where that is not installed. Joules are the
counters of RAPL (/sys/class/powercap, which only root may read on most kernels) and of NVML.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from unisono.observe.memory import available

POWERCAP = Path("/sys/class/powercap")
_QUIET = ("lo",)


class MachineMeter:
    """Reads a host. folder: whose disk is watched. powercap: where the kernel has its counters of energy."""

    def __init__(self, folder: Path, powercap: Path = POWERCAP) -> None:
        self._folder = folder
        self._energy = [*map(JouleCounter, packages(powercap))]
        self._gpus = Gpus()
        self._at, self._counters = time.monotonic(), _counters()

    def facts(self) -> Mapping[str, Any]:
        """What does not change: usable cores, memory and swap in MiB, names of GPUs, sources of energy."""
        return {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_mib": round(psutil.virtual_memory().total / 2**20),
            "gpus": self._gpus.names(),
            "energy": [
                *(["cpu"] if self._energy else []),
                *(["gpu"] if self._gpus.joules() is not None else []),
            ],
        }

    def read(self) -> Mapping[str, Any]:
        """Now, and rates since the last reading. cores: busy ones of all processes. joules: since the host began, by
        source; differences count."""
        at, counters = time.monotonic(), _counters()
        seconds = max(at - self._at, 1e-6)
        rates = {
            name: (value - self._counters.get(name, value)) / seconds for name, value in counters.items()
        }
        self._at, self._counters = at, counters
        swap = psutil.swap_memory()
        taken: dict[str, Any] = {
            "cores": round(rates.pop("busy", 0.0), 2),
            "available_mib": round(available() / 2**20),
            "swap_mib": round(swap.used / 2**20),
            "disk": {
                "read_mib_s": round(rates.pop("read", 0.0) / 2**20, 2),
                "write_mib_s": round(rates.pop("written", 0.0) / 2**20, 2),
            },
            "net": _interfaces(rates),
        }
        with suppress(OSError):
            taken["disk"]["free_mib"] = round(psutil.disk_usage(str(self._folder)).free / 2**20)
        if gpus := self._gpus.read():
            taken["gpus"] = gpus
        joules = {"cpu": sum(counter.read() for counter in self._energy)} if self._energy else {}
        if (of_gpus := self._gpus.joules()) is not None:
            joules["gpu"] = of_gpus
        return (
            {**taken, "joules": {source: round(value, 3) for source, value in joules.items()}}
            if joules
            else taken
        )

    def close(self) -> None:
        self._gpus.close()


def _counters() -> dict[str, float]:
    """What only grows: seconds of busy cores, bytes of disks, bytes by device of the network."""
    times = psutil.cpu_times()
    kinds = ("user", "nice", "system", "irq", "softirq")
    counters = {"busy": sum(getattr(times, kind, 0.0) for kind in kinds)}
    with suppress(OSError, RuntimeError):
        if disks := psutil.disk_io_counters():
            counters |= {"read": float(disks.read_bytes), "written": float(disks.write_bytes)}
    with suppress(OSError):
        for name, device in psutil.net_io_counters(pernic=True).items():
            counters |= {
                f"net {name} sent": float(device.bytes_sent),
                f"net {name} received": float(device.bytes_recv),
            }
    return counters


def _interfaces(rates: Mapping[str, float]) -> dict[str, list[int]]:
    """[bytes sent, bytes received] a second, of the devices that carry any."""
    names = dict.fromkeys(key.split(" ")[1] for key in rates if key.startswith("net "))
    pairs = {
        name: [round(rates.get(f"net {name} {way}", 0.0)) for way in ("sent", "received")] for name in names
    }
    return {name: pair for name, pair in pairs.items() if any(pair)}


def packages(powercap: Path) -> list[Path]:
    """Zones of RAPL that are whole packages, whose counter may be read: parts of a package are in it already."""
    return [
        zone
        for zone in sorted(powercap.glob("intel-rapl:*"))
        if zone.name.count(":") == 1 and os.access(zone / "energy_uj", os.R_OK)
    ]


class JouleCounter:
    """One zone's counter, which begins again at its range. zone: its folder."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._range = _micro(zone / "max_energy_range_uj")
        self._last, self._turns = _micro(self._file), 0.0

    def read(self) -> float:
        """Joules since the counter's first zero. What cannot be read now counts as unchanged."""
        with suppress(OSError, ValueError):
            value = _micro(self._file)
            self._turns += self._range if value < self._last else 0.0
            self._last = value
        return (self._turns + self._last) / 1e6


def _micro(path: Path) -> float:
    return float(path.read_text(encoding="ascii"))


class Gpus:
    """The GPUs of this host as NVML sees them; none where it is not there."""

    def __init__(self) -> None:
        self._nvml, self._handles = None, list[Any]()
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except Exception:  # not installed, no driver, no right: the errors of NVML are classes of its own
            self._nvml, self._handles = None, []

    def names(self) -> list[str]:
        return [
            str(self._ask(lambda nvml, gpu=gpu: nvml.nvmlDeviceGetName(gpu)) or "GPU")
            for gpu in self._handles
        ]

    def read(self) -> list[dict[str, Any]]:
        """A dict for each: busy (share), memory_mib, sm_mhz, memory_mhz, watts, celsius, ecc (uncorrected errors since
        the driver was loaded), throttled. What a card does not tell is absent."""
        return [self._card(gpu) for gpu in self._handles]

    def _card(self, gpu: Any) -> dict[str, Any]:
        asks: dict[str, Callable[[Any], Any]] = {
            "busy": lambda nvml: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory_mib": lambda nvml: round(nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20),
            "sm_mhz": lambda nvml: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda nvml: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "watts": lambda nvml: round(nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, 1),
            "celsius": lambda nvml: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "ecc": lambda nvml: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "throttled": lambda nvml: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & _SLOWED),
        }
        return {name: value for name, ask in asks.items() if (value := self._ask(ask)) is not None}

    def joules(self) -> float | None:
        """Of all cards since their drivers were loaded; None if one does not tell, or there is none."""
        values = [
            self._ask(lambda nvml, gpu=gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
            for gpu in self._handles
        ]
        return None if not values or None in values else sum(values) / 1000

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        try:
            return ask(self._nvml)
        except Exception:  # what a card does not tell is no failure of the run
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._ask(lambda nvml: nvml.nvmlShutdown())
            self._nvml, self._handles = None, []


_SLOWED = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons of NVML for slower clocks that are trouble: hardware, software heat, hardware heat, power brake."""

"""What is particular to a kind of device, in one place: CPUs, GPUs under CUDA, and a simulated device.

Another kind of device (`xpu`, `mps`) is an edit of this file, and a house test holds others to asking it.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed

# torch's flight recorder, of which the stubs know nothing
RECORDER: Any = importlib.import_module("torch._C._distributed_c10d")
GPU, GPU_BACKEND = "cuda", "nccl"
CPU_BACKEND = "gloo"
# A device that is simulated on the CPU, in the order in which a GPU computes: see `comm.sim` of the sister package.
SIM, SIM_BACKEND = "sim", "simccl"
# A device that is only imagined: tensors have shapes and no numbers, and all takes the ways that it takes on a GPU.
META, IMAGINED = "meta", "imagined"
_FLOAT8 = (8, 9)  # compute capability of the first GPUs with products of eight bits


def names() -> list[str]:
    """The GPUs that this process may use, by their model."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [torch.cuda.get_device_name(device) for device in devices]


def software() -> str:
    """What drives the GPUs, with its version."""
    return f"CUDA {torch.version.cuda}"


def count() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def in_use() -> bool:
    """Whether this process has begun to use GPUs, which a forked child of it could not use."""
    return torch.cuda.is_initialized()


def built() -> frozenset[str]:
    """The backends that torch was built with: of gloo, nccl, mpi."""
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return frozenset(name for name, has in there.items() if has)


def beside_cpus(backend: str) -> str:
    """The backend with one for what lives on the CPU beside it: seeds, orders, weights that are still there."""
    if backend.startswith(SIM):
        return SIM_BACKEND  # which serves both
    return f"cpu:{CPU_BACKEND},{GPU}:{GPU_BACKEND}" if backend == GPU_BACKEND else backend


def of_rank(backend: str, local_rank: int) -> torch.device:
    """The device of a rank: its GPU under NCCL, which becomes this thread's, else the CPU. Where there are fewer GPUs
    than ranks, they take turns."""
    if backend == IMAGINED:
        return torch.device(META)
    if backend.startswith(SIM):
        return _simulated().install(backend).place
    device = torch.device(GPU, local_rank % count()) if backend == GPU_BACKEND else torch.device("cpu")
    adopt(device)
    return device


def of_script() -> torch.device:
    """The device of a script that nobody has placed: the GPU that this thread stands on, if there is one."""
    return numbered(torch.device(GPU)) if torch.cuda.is_available() else torch.device("cpu")


def of_wire(device: torch.device) -> torch.device:
    """Where small numbers travel between ranks that compute on `device`: the CPU, unless the process group knows GPUs
    only."""
    only_gpus = dist.is_initialized() and dist.get_backend() == GPU_BACKEND
    return device if only_gpus else torch.device("cpu")


def adopt(device: torch.device) -> None:
    """Let this thread stand on its GPU. A new one stands on GPU 0, and would take memory that is not its own."""
    if device.type == GPU:
        torch.cuda.set_device(device)


def numbered(device: torch.device) -> torch.device:
    """The device with its number: `cuda` alone is the one that this thread stands on."""
    is_open = _has_streams(device) and device.index is None
    return torch.device(device.type, torch.get_device_module(device).current_device()) if is_open else device


def is_apart(x: Tensor | torch.device) -> bool:
    """Whether a tensor or device has memory and a stream of its own: copies from it may be pinned and go on beside."""
    return (x if isinstance(x, torch.device) else x.device).type in (GPU, SIM, META)


def has_numbers(device: torch.device) -> bool:
    """Whether tensors there have numbers, or shapes alone."""
    return device.type != META


def sharded_as(device: torch.device) -> tuple[str, bool]:
    """(the kind of device that FSDP2 takes it for, whether its collectives are left to our groups)."""
    return ("cpu", True) if device.type in ("cpu", META) else (device.type, False)


def casting(device: torch.device) -> str:
    """The kind of device by which torch's autocast knows it."""
    return device.type if has_numbers(device) else "cpu"


def attention_kernels(x: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Fused causal or full attention that also gives the logarithm of each query's sum, and its backward; None where
    this version knows none for the device of x."""
    ops = torch.ops.aten
    if x.device.type != "cpu":
        return None
    return (
        ops._scaled_dot_product_flash_attention_for_cpu,
        ops._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def check_float8(device: torch.device) -> None:
    """Raises UsageError U-P26 where a device multiplies no numbers of eight bits. CPUs do it by way of wider ones."""
    if device.type != GPU or torch.cuda.get_device_capability(device) >= _FLOAT8:
        return
    what = f"{torch.cuda.get_device_name(device)} multiplies no numbers of eight bits"
    fix = "precision=bf16, a GPU of compute capability 8.9 or more (L40S, H100, H200, B200), or CPUs, which emulate it"
    raise UsageError(what, where="plan.precision", fix=fix, code="P26")


def has_fused(device: torch.device) -> bool:
    """Whether torch's optimisers have a fused kernel for the device."""
    return device.type in ("cpu", GPU, SIM)


def between_cpus(pg: dist.ProcessGroup) -> bool:
    """Whether a process group is one of CPUs."""
    return pg.name() not in (GPU_BACKEND, SIM_BACKEND, IMAGINED)


def arithmetic(device: torch.device) -> str:
    """What decides the bits of a sum there: a GPU's model, or the vector instructions of a CPU."""
    return (
        torch.cuda.get_device_name(device) if device.type == GPU else torch.backends.cpu.get_cpu_capability()
    )


def properties(device: torch.device) -> dict[str, Any]:
    """A GPU's `name`, `memory` in bytes and `units`, a simulated device's `memory`; nothing of a CPU, which is
    measured."""
    if device.type == SIM:
        return {"memory": tally(device).limit}
    if device.type != GPU:
        return {}
    known = torch.cuda.get_device_properties(device)
    return {"memory": known.total_memory, "units": known.multi_processor_count, "name": known.name}


def random_states() -> list[Tensor]:
    """States of torch's default generators: the CPU's, and of the GPU that this thread stands on if it is in use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_random_states(states: Sequence[Tensor]) -> None:
    """What `random_states` gave; a GPU that came into use since keeps its own."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def seeded_states(seed: int) -> list[Tensor]:
    """As `random_states`, of generators with this seed."""
    kinds = ["cpu", *([GPU] if torch.cuda.is_initialized() else [])]
    return [torch.Generator(kind).manual_seed(seed).get_state() for kind in kinds]


def drain(device: torch.device) -> None:
    """Return when this thread's stream on the device is empty; a CPU has none."""
    if _has_streams(device):
        torch.get_device_module(device).current_stream(device).synchronize()


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that it was given; a CPU has."""
    if _has_streams(device):
        torch.get_device_module(device).synchronize(device)


def mark(device: torch.device) -> Any:
    """A moment of what this thread has asked of a GPU; None of a device that is only imagined."""
    if not _has_streams(device):
        return None
    module = torch.get_device_module(device)
    return module.current_stream(device).record_event(module.Event(enable_timing=True))


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one moment of a GPU to a later one, which is waited for; 0 on a device that is only imagined."""
    if begin is None or end is None:
        return 0.0
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def profiled_activities() -> list[torch.profiler.ProfilerActivity]:
    """What torch's profiler looks at beside the CPU. On GPUs not yet run."""
    return [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []


def allocator(device: torch.device) -> dict[str, int]:
    """A GPU's caching allocator, in bytes: `reserved` from the device, `allocated` to tensors, `split` (free pieces of
    segments that tensors still use, which no larger tensor fits: its fragmentation), and `segments`, their number.
    Nothing of a CPU. On GPUs not yet run."""
    if device.type != GPU:
        return {}
    segments = torch.cuda.memory_snapshot()
    used = [segment for segment in segments if segment["allocated_size"]]
    return {
        "reserved": sum(segment["total_size"] for segment in segments),
        "allocated": sum(segment["allocated_size"] for segment in segments),
        "split": sum(segment["total_size"] - segment["allocated_size"] for segment in used),
        "segments": len(segments),
    }


def spins() -> bool:
    """Whether this process waits for a device of its own, and so never stands quite still."""
    return torch.cuda.is_initialized()


def begun_collectives() -> str:
    """How far each process group is, in torch's own words: they change with each collective that begins."""
    dump = getattr(RECORDER, "_dump_nccl_trace_json", None) or RECORDER._dump_fr_trace_json
    return str(json.loads(dump()).get("pg_status"))


def recorded_backends() -> list[str]:
    """The backends of which torch's flight recorder keeps collectives in this process."""
    backends = [CPU_BACKEND] if hasattr(RECORDER, "_dump_fr_trace_json") else []
    return [*backends, GPU_BACKEND] if spins() and hasattr(RECORDER, "_dump_nccl_trace") else backends


def recorded(backend: str, frames: bool) -> bytes:
    """What the flight recorder keeps of a backend's collectives: JSON or, with the lines that began them, a pickle."""
    kind = "nccl" if backend == GPU_BACKEND else "fr"
    if frames:
        return getattr(RECORDER, f"_dump_{kind}_trace")(includeStackTraces=True)
    return getattr(RECORDER, f"_dump_{kind}_trace_json")()


def host_room(nbytes: int, device: torch.device) -> Tensor:
    """Bytes of host memory, uint8 [nbytes], to and from which `device` copies on its own. Beside a device without
    numbers they are never touched, and whoever looks on does not see them."""
    if not has_numbers(device):
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return host_like(torch.empty(nbytes, dtype=torch.uint8, device="meta"), device)


def host_like(x: Tensor, device: torch.device) -> Tensor:
    """Host memory of the shape and dtype of x, without values, to and from which `device` copies on its own."""
    if device.type == SIM:
        return _simulated().page_locked(x.shape, x.dtype)
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=device.type == GPU)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """x in host memory from which `device` copies on its own."""
    return host_like(x, device).copy_(x) if device.type == SIM else x.pin_memory()


class Lane:
    """Copies between a device and its host, in their order and beside what is computed: a stream of their own. On a CPU
    a copy is over when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if _has_streams(device) else None
        self._stream = self._module.Stream(device) if self._module else None

    def copy(self, to: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin a copy of what `source` is once all that this thread has asked of the device is done. What is returned
        lets the thread's stream wait for it."""
        if self._stream is None:
            to.copy_(source)
            return _nothing
        module, device = self._module, self._device
        self._stream.wait_stream(module.current_stream(device))
        with module.stream(self._stream):
            to.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        for x in (to, source):
            if x.device.type == device.type:
                x.record_stream(self._stream)
        return lambda: module.current_stream(device).wait_event(done)

    def drain(self) -> None:
        """Return when all copies are over."""
        if self._stream is not None:
            self._stream.synchronize()


def tally(device: torch.device) -> Any:
    """What a simulated device has counted so far, see its `DeviceTally`; None of any other."""
    return _simulated().tally() if device.type == SIM else None


def begin_peak(device: torch.device) -> None:
    """The peak of a device's memory counts from here; nothing on a CPU."""
    if _has_streams(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def notes(device: torch.device) -> list[str]:
    """What a simulated device has to say when a run ends; nothing of any other."""
    return [] if device.type != SIM else tally(device).says()


def _has_streams(device: torch.device) -> bool:
    return device.type in (GPU, SIM)


def _simulated() -> Any:
    return contributed("unisono.comm.sim")


def _nothing() -> None:
    """Nobody waits for what is over."""
